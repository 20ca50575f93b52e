"""Top-k distributions as lists of the tokens that stay, instead of rows over the vocabulary.

With top-k a row of `sampling.sampled_distribution` has at most k tokens. The accept rules read a
distribution at the draft's token and in sums over tokens, so they can judge these lists: behind the
cuts p_t is 0 elsewhere, and the residual max(p_t - p_d, 0) with it. Values, cuts and ties are those
of `sampled_distribution`. No value is read on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dspark.verify.sampling import kept_prefix

_BLOCK = 64  # tokens; fewer than 256, so that ranks within a block fit uint8


class Candidates(NamedTuple):
    """tokens: [N, C] int64, ascending; V from the end of a row's kept tokens on. probs: [N, C]
    float32, 0 there, rows summing to 1."""

    tokens: Tensor
    probs: Tensor


def top_candidates(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, most: int
) -> Candidates:
    """List the kept tokens of rows that all have a top-k.

    logits: [N, V] of any float type. temperature: [N] float > 0. top_k: [N] integer in 1..most.
    top_p: [N] float, from 1 on nothing is cut. min_p: [N] float in [0, 1]. most: known on the host.
    C is min(most, V). Memory: 8 bytes a logit and about 330 a candidate, freed on return but for 12
    a candidate.
    """
    probs = torch.softmax(logits.float() / temperature[:, None].float(), dim=-1)  # [N, V]
    ordered, tokens = torch.topk(probs, min(most, probs.shape[1]), dim=1)  # [N, C] descending
    top_p = top_p.masked_fill(top_p >= 1, torch.inf)  # as in `truncate_all`
    keep = kept_prefix(ordered, ordered.cumsum(dim=1), top_k, top_p, min_p)
    count = keep.sum(dim=1, keepdim=True)  # [N, 1]
    smallest = ordered.gather(1, (count - 1).clamp_min(0))
    above = (ordered > smallest).sum(dim=1, keepdim=True)
    rank = torch.arange(ordered.shape[1], device=probs.device)
    # topk chooses freely among equals, and may list other ones than the lowest tokens.
    equals = equal_tokens(probs, smallest, (rank - above + 1).clamp_min(1))
    tokens = torch.where(rank < above, tokens, equals)
    kept = ordered * keep
    kept /= kept.sum(dim=1, keepdim=True)
    tokens, order = tokens.masked_fill(~keep, probs.shape[1]).sort(dim=1)
    return Candidates(tokens, kept.gather(1, order))


def equal_tokens(probs: Tensor, value: Tensor, ranks: Tensor) -> Tensor:
    """Find the lowest tokens whose probability equals a row's value.

    probs: [N, V]. value: [N, 1]. ranks: [N, C] int64 >= 1; 1 asks for the lowest such token.
    Returns [N, C] int64 in 0..V - 1; any token where fewer than `ranks` are equal.
    """
    rows, vocab = probs.shape
    blocks = -(-vocab // _BLOCK)
    equal = torch.zeros((rows, blocks, _BLOCK), dtype=torch.bool, device=probs.device)
    equal.view(rows, -1)[:, :vocab] = probs == value
    ends = equal.sum(-1, dtype=torch.int32).cumsum(1)  # [N, blocks] equals up to a block's end
    block = torch.searchsorted(ends, ranks).clamp(max=blocks - 1)  # [N, C]
    inside = equal[torch.arange(rows, device=probs.device)[:, None], block]  # [N, C, _BLOCK]
    running = inside.cumsum(-1, dtype=torch.uint8)
    rank = ranks - (ends.gather(1, block) - running[..., -1])  # within the block
    found = running == rank.clamp(max=255).to(torch.uint8)[..., None]
    place = found.to(torch.uint8).argmax(-1)  # the first of equal maxima
    return block * _BLOCK + place
