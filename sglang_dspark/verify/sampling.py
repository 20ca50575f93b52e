"""Compute the distribution that plain decoding samples from: temperature, top-k, top-p, min-p.

The order is that of SGLang's samplers (sglang/srt/layers/sampler.py): softmax of logits /
temperature, then top-k and top-p jointly (both cut the same sorted softmax, without renormalising
between them), then min-p relative to the largest probability, then one normalisation. Rejection
sampling is lossless only for the distribution given here, so every verify row uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A cut seldom keeps more tokens than the first try; sorting few is many times faster than all.
_FIRST_TRY = 128
_GROWTH = 16


@dataclass(frozen=True)
class BatchSampling:
    """Sampling settings of R requests.

    temperature: [R] float >= 0; 0 means greedy. top_k: [R] int64 >= 1; V or more keeps all.
    top_p: [R] float in (0, 1]; min_p: [R] float in [0, 1].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def __post_init__(self) -> None:
        shape = self.temperature.shape
        if len(shape) != 1 or any(t.shape != shape for t in (self.top_k, self.top_p, self.min_p)):
            raise ValueError("temperature, top_k, top_p and min_p must all be [R]")
        if not bool((self.temperature >= 0).all()):
            raise ValueError(f"temperature must be >= 0: {self.temperature.tolist()}")
        if not bool((self.top_k >= 1).all()):
            raise ValueError(f"top_k must be >= 1: {self.top_k.tolist()}")
        if not bool(((self.top_p > 0) & (self.top_p <= 1)).all()):
            raise ValueError(f"top_p must lie in (0, 1]: {self.top_p.tolist()}")
        if not bool(((self.min_p >= 0) & (self.min_p <= 1)).all()):
            raise ValueError(f"min_p must lie in [0, 1]: {self.min_p.tolist()}")

    @classmethod
    def uniform(
        cls,
        rows: int,
        temperature: float = 0.0,
        top_k: int = 1 << 30,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> BatchSampling:
        """Return the same settings for each of `rows` requests."""
        return cls(
            temperature=torch.full((rows,), temperature, dtype=torch.float32),
            top_k=torch.full((rows,), top_k, dtype=torch.int64),
            top_p=torch.full((rows,), top_p, dtype=torch.float32),
            min_p=torch.full((rows,), min_p, dtype=torch.float32),
        )


def target_distribution(logits: Tensor, sampling: BatchSampling) -> Tensor:
    """Return the probabilities that plain decoding would sample each position from.

    logits: [R, q, V] of any float type. Returns [R, q, V] float32, rows summing to 1; a request at
    temperature 0 gets one-hot rows at its argmax. If equal probabilities straddle a top-k or top-p
    cut, the lowest token ids are kept. Raises ValueError if the row counts differ.
    """
    rows, width, vocab = logits.shape
    if sampling.temperature.shape[0] != rows:
        raise ValueError(f"{rows} rows of logits, {sampling.temperature.shape[0]} of settings")
    greedy = sampling.temperature == 0  # [R]
    scale = torch.where(greedy, torch.ones_like(sampling.temperature), sampling.temperature)
    probs = torch.softmax(logits.float() / scale[:, None, None].float(), dim=-1)
    if greedy.any():
        choice = logits[greedy].argmax(dim=-1, keepdim=True)  # [G, q, 1]
        probs[greedy] = torch.zeros_like(probs[greedy]).scatter_(2, choice, 1.0)
    cut = ~greedy & ((sampling.top_k < vocab) | (sampling.top_p < 1) | (sampling.min_p > 0))
    if cut.any():
        flat = probs[cut].reshape(-1, vocab)
        top_k, top_p, min_p = (
            setting[cut].repeat_interleave(width)
            for setting in (sampling.top_k, sampling.top_p, sampling.min_p)
        )
        probs[cut] = truncate(flat, top_k, top_p, min_p).reshape(-1, width, vocab)
    return probs


def sampled_distribution(
    logits: Tensor,
    temperature: Tensor,
    cuts: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Return `target_distribution` of rows that are all sampled; the host reads no value.

    logits: [N, V] of any float type. temperature: [N] float > 0. cuts: top-k [N] integer, top-p [N]
    and min-p [N] float; None: no row is cut. Returns [N, V] float32.
    """
    probs = torch.softmax(logits.float() / temperature[:, None].float(), dim=-1)
    return probs if cuts is None else truncate_all(probs, *cuts)


def truncate_all(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Run `truncate` with all tokens sorted; the host reads no value."""
    # By rounding, the mass before the last tokens may exceed 1, but top_p 1 must not cut them.
    top_p = top_p.masked_fill(top_p >= 1, torch.inf)
    return _truncate(probs, top_k, top_p, min_p, probs.shape[1])


def truncate(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Cut by top-k, top-p and min-p and renormalise; probs [N, V], settings [N] -> [N, V]."""
    return _truncate(probs, top_k, top_p, min_p, min(_FIRST_TRY, probs.shape[1]))


def kept_prefix(
    ordered: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Mark the likeliest tokens that top-k, top-p and min-p keep: a prefix of each row.

    ordered: [N, n] the largest probabilities, descending. mass: its cumulative sum. settings: [N].
    Returns [N, n] bool; a row that is NaN keeps nothing.
    """
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    keep = (rank[None, :] < top_k[:, None]) & (mass - ordered <= top_p[:, None])
    return keep & (ordered >= (ordered[:, 0] * min_p)[:, None])


def _truncate(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int) -> Tensor:
    """Run `truncate` with only the `width` likeliest tokens sorted.

    Rows whose cut is further down are redone with more.
    """
    vocab = probs.shape[1]
    ordered = torch.topk(probs, width, dim=1).values  # [N, width] descending
    mass = ordered.cumsum(dim=1)
    keep = kept_prefix(ordered, mass, top_k, top_p, min_p)
    count = keep.sum(dim=1, keepdim=True)  # [N, 1]; the kept set is a prefix of the order
    # A NaN row keeps nothing; the clamp avoids a negative index.
    smallest = ordered.gather(1, (count - 1).clamp_min(0))  # [N, 1]
    above = probs > smallest
    equal = probs == smallest
    room = count - above.sum(dim=1, keepdim=True)
    kept = probs * (above | (equal & (equal.cumsum(dim=1) <= room)))
    kept /= kept.sum(dim=1, keepdim=True)

    further = keep[:, -1] & (top_k > width) & (mass[:, -1] <= top_p)
    if width < vocab and bool(further.any()):
        settings = top_k[further], top_p[further], min_p[further]
        kept[further] = _truncate(probs[further], *settings, min(width * _GROWTH, vocab))
    return kept
