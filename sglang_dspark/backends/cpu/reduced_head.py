"""Draft over a reduced vocabulary: multiply only the rows of the heads that can be drafted.

The draft's base logits U_k and its transition bias B(x_{k-1}) span the whole vocabulary, for each
of gamma positions. A drafter trained here may exclude most tokens by its own weights
(drafter/heads.py, `restrict_vocabulary`: a bias of -30 outside). Upstream
(sglang/srt/speculative/dspark_components/dspark_draft.py) computes all of them, and draws noise for
all of them even when every request is greedy. Here the rows inside are gathered once, when the step
is attached. A sampled block returns logits of -inf outside: the probability there is exactly 0, in
the distribution that the tokens were drawn from, as verification requires.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import linear, packed_weights
from sglang_dspark.backends.cpu.csrc import operator
from sglang_dspark.backends.cpu.fast_paths import require, require_class, supported
from sglang_dspark.backends.cpu.linear import product
from sglang_dspark.backends.cpu.weight_formats import take_rows
from sglang_dspark.drafter.draft_confidence import LEAST_REST, certainty, draft_confidence
from sglang_dspark.drafter.heads import restricted_tokens
from sglang_dspark.serving import upstream, weight_updates
from sglang_dspark.step.seeds import DraftSeeds
from sglang_dspark.verify.rejection import sample_inverse_cdf

_REDUCED = "dspark_reduced_head"  # attribute of a draft model: its `ReducedHead`, or None
_P, _N = c_void_p, c_int64
_DRAFT = ("draft_block", _P, _P, c_int32, _P, _N, _N, _N, _P, _N, _P, _P, _N, _N, _P, _P, _P)


@dataclass(frozen=True)
class ReducedHead:
    """The rows of the LM head and of the vanilla Markov head that can be drafted.

    tokens: [n] ascending token ids. lm_head: [n, d]. w1: [V, r], the drafter's own, for every
    previous token. w2: [n, r], which each of gamma steps reads: packed where the draft's
    layers are (weight_formats.py). All but w1 are copies, made again after an update of weights.
    """

    tokens: Tensor
    lm_head: Tensor
    w1: Tensor
    w2: Tensor

    @cached_property
    def supports_kernel(self) -> bool:
        """Return whether the compiled loop supports both factors."""
        plain = self.w1.dtype is torch.float32 and self.w1.is_cpu and self.w1.is_contiguous()
        return plain and linear.kernel_of(self.w2) is not None


def reduced_head(w1: Tensor, w2: Tensor, lm_head: Tensor) -> ReducedHead | None:
    """Reduce a vanilla head's weights [V, r] and the LM head [>= V, d]; None without restriction.

    W2's rows get the stored format.
    """
    tokens = restricted_tokens(w1, w2)
    if tokens is None or tokens.numel() == w1.shape[0]:
        return None
    with torch.no_grad():
        return ReducedHead(
            tokens=tokens,
            lm_head=take_rows(lm_head.detach(), tokens),
            w1=w1.detach(),
            w2=packed_weights.packed_copy(w2.detach()[tokens]),
        )


def find_reduced_head(model: Any) -> ReducedHead | None:
    """Reduce a draft model's heads, in the formats of target and draft; None if unsupported.

    Other heads use upstream's code.
    """
    if not isinstance(model, upstream.DSparkDraftMixin):
        return None
    if not supported("drafting over a part of the vocabulary", lambda: _require_plain(model)):
        return None
    w1, w2 = model.markov_head.markov_w1.weight, model.markov_head.markov_w2.weight
    return reduced_head(w1, w2, model.lm_head.weight)


def reduced_head_of(model: Any) -> ReducedHead | None:
    """Return `find_reduced_head` of a draft model's present weights, resolved once."""
    if _REDUCED not in model.__dict__:
        model.__dict__[_REDUCED] = find_reduced_head(model)
    found: ReducedHead | None = model.__dict__[_REDUCED]
    return found


def _forget(model: Any) -> None:
    model.__dict__.pop(_REDUCED, None)


weight_updates.FORGET.append(_forget)


def _require_plain(model: Any) -> None:
    head, lm_head = model.markov_head, model.lm_head
    require_class("its head", head, upstream.VanillaMarkov)
    ranks = int(getattr(lm_head, "tp_size", 1))
    require(head.vocab_shard is None and ranks == 1, "the vocabulary is split over ranks")
    require(not packed_weights.is_quantised(lm_head), "the LM head is quantised")
    require(not getattr(lm_head, "use_intel_amx_backend", False), "the LM head is packed for AMX")
    ours = lm_head.weight.is_floating_point() or packed_weights.holds(lm_head)
    require(ours, "the LM head is quantised")
    whole = lm_head.weight.shape[0] >= head.vocab_size
    require(whole, "the LM head has fewer tokens than the draft")


def base_logits(head: ReducedHead, hidden: Tensor) -> Tensor:
    """Compute base logits: hidden [R * gamma, d] -> U [R * gamma, n], columns `head.tokens`."""
    wide = hidden.dtype is torch.float32
    return product(hidden if wide else hidden.to(head.lm_head.dtype), head.lm_head)


def draft_steps(
    head: ReducedHead, base: Tensor, anchor: Tensor, out: Tensor, steps: range, rest: Tensor | None
) -> None:
    """Fill out[:, steps], [R, gamma] int64, with the likeliest tokens of U_k + W1[x_{k-1}] W2^T.

    head: `supports_kernel`. base [R, gamma, n] contiguous float32; anchor [R] int64, the token
    before the first of `steps`. rest: [R, gamma] float32, filled at `steps` with (1 - p) / p of the
    likeliest token's probability p.
    """
    (requests, gamma, n), rank = base.shape, head.w1.shape[1]
    multiply, run = linear.kernel_of(head.w2), operator(*_DRAFT)
    assert multiply is not None
    assert run is not None
    room = torch.empty(requests * (rank + n))
    run(
        multiply.entry, head.w2.data_ptr(), linear.threads_for(n, rank), base.data_ptr(), requests,
        gamma, n, head.w1.data_ptr(), rank, head.tokens.data_ptr(), anchor.data_ptr(), steps.start,
        steps.stop, out.data_ptr(), room.data_ptr(), None if rest is None else rest.data_ptr(),
    )  # fmt: skip


def draft_greedy(
    head: ReducedHead,
    base: Tensor,
    anchor: Tensor,
    agree: Callable[[Tensor], Tensor] | None = None,
    confidence: Tensor | None = None,
) -> Tensor:
    """Draft the greedy block: base [R, gamma, n], anchor [R] int64 -> tokens [R, gamma] int64.

    agree: makes the ranks of a group draft the same token, [R] -> [R]; None for a single rank.
    confidence: [R, gamma] float32, filled with `draft_confidence` of each position; None: a
    confidence head computes it.
    """
    requests, gamma, _ = base.shape
    compiled = head.supports_kernel and base.is_contiguous() and 0 < requests <= linear.MAX_ROWS
    compiled = compiled and base.dtype is torch.float32
    at_once = gamma if compiled and agree is None else 1
    out = torch.empty(requests, gamma, dtype=torch.int64)
    for k in range(0, gamma, at_once):
        previous = anchor if k == 0 else out[:, k - 1].contiguous()
        if compiled:
            draft_steps(head, base, previous, out, range(k, k + at_once), confidence)
        else:
            step = base[:, k] + _bias(head, previous)
            out[:, k] = head.tokens[step.argmax(-1)]
            if confidence is not None:
                confidence[:, k] = draft_confidence(step[:, None])[:, 0]
        if agree is not None:
            out[:, k] = agree(out[:, k].contiguous())
    if compiled and confidence is not None:  # the loop wrote (1 - p) / p
        confidence.clamp_min_(LEAST_REST).log_().neg_()
    return out


def draft_sampled(
    head: ReducedHead,
    base: Tensor,
    anchor: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    agree: Callable[[Tensor], Tensor],
    seeded: DraftSeeds | None = None,
    confidence: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample a block left to right; also return its logits, which define each distribution.

    base [R, gamma, n], anchor [R], temperatures [R] (0: the likeliest token), uniforms
    [R, gamma] float64 in [0, 1) (`block_uniforms`), seeded: the requests that draw by their seed
    instead of the uniforms -> tokens [R, gamma] int64, logits U_k + B [R, gamma, V]
    before the temperature, -inf outside the draft vocabulary. confidence: as for `draft_greedy`,
    at the requests' temperatures.
    """
    sampled = temperatures > 0
    temperature = torch.where(sampled, temperatures, 1.0)[:, None]
    logits = base.new_full((*base.shape[:2], len(head.w1)), -torch.inf)
    previous = anchor.long()
    drafted = []
    for k in range(base.shape[1]):
        step = base[:, k] + _bias(head, previous)
        logits[:, k].index_copy_(1, head.tokens, step)
        distribution = torch.softmax(step / temperature, -1)  # [R, n]
        if confidence is not None:  # from the distribution: the token is drawn below
            confidence[:, k] = certainty(distribution)
        column = sample_inverse_cdf(distribution, uniforms[:, k])
        if seeded is not None:
            column = seeded.drawn(column, step, temperature[:, 0], k, head.tokens)
        column = torch.where(sampled, column, step.argmax(-1))
        previous = agree(head.tokens[column])
        drafted.append(previous)
    return torch.stack(drafted, 1), logits


def block_uniforms(key: int, offset: int, shape: tuple[int, int]) -> Tensor:
    """Draw the uniforms of one block [R, gamma], the same for a key and offset on every rank.

    float64 has 2^53 values, so a token is drafted with its probability to within 2^-53. Float32
    noise for each token is too coarse: an exponential that rounds to 0, as one in 2^23 did, wins
    for any probability of the token.
    """
    generator = np.random.Generator(np.random.Philox(key=[key % 2**64, offset % 2**64]))
    return torch.from_numpy(generator.random(shape))


def _bias(head: ReducedHead, previous: Tensor) -> Tensor:
    """Compute the transition bias of the draft vocabulary: previous [R] -> [R, n]."""
    return product(head.w1[previous], head.w2)
