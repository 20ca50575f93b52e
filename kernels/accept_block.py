"""Verify sampled windows as a whole, without a tensor of probabilities.

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding".

The rule is `sglang_dspark.verify.block.accept_block`, for requests that are neither greedy nor
seeded and whose drafts were drawn from logits. Every other request has the rule of
`accept_sampled.py`, which also runs steps of argmax drafts. Two launches. In the first a
program of each request and row records the draft's probabilities in p_t and p_d, and the findings
of the token rule. In the second a program of each request and draft i but the last computes
p_1 .. p_l and sums S_i, one pass over both rows. The last program to arrive, found by a counter
that it resets, walks h_1 .. h_l and draws from max(p_tau p_t - p_d, 0), or from p_t. Where the
whole window is accepted no sums are formed.

Outcomes are the reference's except where a uniform lies within rounding of a boundary: weights are
float32 and p_i, S_i and all sums float64 here, where torch rounds probabilities to float32.

Extra memory: 8 float64 a row, 3 a draft, 2 int64 and a counter a request, for any vocabulary:
175 KiB at 256 requests of 8 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.accept_rows import dist_tile, residual_tile
from sglang_dspark.kernels.accept_sampled import (
    GPU,
    Outcome,
    Tiling,
    accept_triton,
    empty_outcome,
)
from sglang_dspark.kernels.accept_verdicts import (
    FINDINGS,
    carried,
    dist_of,
    emitted,
    found,
    judge,
    leading,
    rest_of,
    windows_of,
)
from sglang_dspark.kernels.accept_windows import Windows, check

_CHANCES = 3  # float64 of a draft: its p_t and p_d, and S of the drafts before it


def accept_block_triton(
    given: Windows,
    arrivals: Tensor | None = None,
    how: Tiling = GPU,
    into: Outcome | None = None,
) -> Outcome:
    """Accept the drafts of a step by the block rule; arguments and errors of `accept_triton`."""
    requests, gamma = given.drafts.shape
    if given.draft_logits is None or gamma == 0 or requests == 0:
        return accept_triton(given, arrivals, how, into)
    check(given, arrivals)
    device = given.drafts.device
    if arrivals is None:
        arrivals = torch.zeros(requests, dtype=torch.int32, device=device)
    findings = torch.empty((requests, gamma + 1, FINDINGS), dtype=torch.float64, device=device)
    chances = torch.empty((requests, gamma, _CHANCES), dtype=torch.float64, device=device)
    kept = into or empty_outcome(requests, device)
    groups = triton.cdiv(requests, how.requests)
    _judge_kernel[(groups, gamma + 1)](*given.operands(), findings, chances, **_sizes(given, how))
    # S_i only where a draft follows i; a window of one draft still has a program to draw.
    _keep_kernel[(groups, max(gamma - 1, 1))](
        *given.operands(), findings, chances, arrivals, *kept, **_sizes(given, how)
    )
    return kept


def _sizes(given: Windows, how: Tiling) -> dict[str, int]:
    requests, gamma = given.drafts.shape
    vocab, draft = given.logits.shape[1], given.draft_logits
    assert draft is not None, "an argmax is judged token by token"
    return {
        "requests": requests,
        "gamma": gamma,
        "vocab": vocab,
        "row_stride": given.logits.stride(0),
        "draft_stride": draft.stride(0),
        "draft_row_stride": draft.stride(1),
        "rows": how.requests,
        "block": min(how.block, triton.next_power_of_2(vocab)),
        "num_warps": how.num_warps,
    }


@triton.jit(do_not_specialize=["requests"])  # compiled once, not for each kind of batch
def _judge_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded, seeds, anchors, skipped,
    findings, chances, requests, gamma, vocab,
    row_stride, draft_stride, draft_row_stride, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    group, place = tl.program_id(0), tl.program_id(1)
    r, length = windows_of(lengths, skipped, group, requests, gamma, rows)
    target = (logits, temperatures, row_stride, vocab)
    draft = (draft_logits, draft_temperatures, draft_stride, draft_row_stride)
    cut: tl.constexpr = top_k is not None or top_p is not None or min_p is not None
    if tl.max(length, 0) >= place:
        wanted, proposed = judge(
            r, place, length, gamma, drafts, target, draft, (top_k, top_p, min_p),
            accept_uniforms, greedy, (seeded, seeds, anchors), findings, cut, rows, block,
        )  # fmt: skip
        at = chances + (r * gamma + place) * 3
        tl.store(at, wanted, mask=place < length)
        tl.store(at + 1, proposed, mask=place < length)


@triton.jit(do_not_specialize=["requests"])
def _keep_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded, seeds, anchors, skipped,
    findings, chances, arrivals, accepted, bonus, requests, gamma, vocab,
    row_stride, draft_stride, draft_row_stride, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    group, i = tl.program_id(0), tl.program_id(1) + 1
    r, length = windows_of(lengths, skipped, group, requests, gamma, rows)
    target = (logits, temperatures, row_stride, vocab)
    draft = (draft_logits, draft_temperatures, draft_stride, draft_row_stride)
    cut: tl.constexpr = top_k is not None or top_p is not None or min_p is not None
    drawn = found(findings + r * (gamma + 1) * 8 + 1, length >= 0) < 0  # no token was chosen
    chance, whole = _standing(chances, accept_uniforms, r, length, gamma, i, rows)
    summed = drawn & (i < length) & ~whole
    if tl.max(summed.to(tl.int32), 0) > 0:
        dist = dist_of(r, i, summed, gamma, target, findings)
        rest = rest_of(r, i, summed, gamma, drafts, draft, findings)
        left = _left(dist, draft_logits, rest, chance, summed, vocab, cut, rows, block)
        tl.store(chances + (r * gamma + i) * 3 + 2, left, mask=summed)
    tl.debug_barrier()  # a program's sums are written before it arrives
    if tl.atomic_add(arrivals + group, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(arrivals + group, 0)
        taken, share = _walked(chances, accept_uniforms, r, length, gamma, rows)
        taken = tl.where(drawn, taken, leading(findings, r, length, gamma, rows))
        token = emitted(
            r, taken, length, gamma, drafts, target, draft, share, bonus_uniforms, findings,
            cut, rows, block,
        )  # fmt: skip
        tl.store(accepted + r, taken.to(tl.int64), mask=length >= 0)
        tl.store(bonus + r, token.to(tl.int64), mask=length >= 0)


@triton.jit
def _next_chance(chance, at, verified):
    return carried(chance, found(at, verified), found(at + 1, verified), verified)


@triton.jit
def _standing(chances, uniforms, r, length, gamma, i, rows: tl.constexpr):
    """Return p_i, and whether all of the window is accepted."""
    chance = tl.full([rows], 1.0, tl.float64)
    here = chance
    for place in range(0, gamma):
        chance = _next_chance(chance, chances + (r * gamma + place) * 3, place < length)
        here = tl.where(place < i, chance, here)
    last = tl.load(uniforms + r * gamma + length - 1, mask=length > 0, other=1.0)
    return here, last < chance


@triton.jit
def _left(
    dist, logits, rest, share, active, vocab,
    cut: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Sum S_i [rows] float64."""
    left = tl.zeros([rows, block], tl.float64)
    seen = tl.zeros([rows], tl.int32)
    for at in range(0, vocab, block):
        p, seen = dist_tile(dist, active, seen, at, vocab, cut, block)
        left += residual_tile(p, logits, rest, share, active, at, vocab, block)
    return tl.sum(left, 1)


@triton.jit
def _walked(chances, uniforms, r, length, gamma, rows: tl.constexpr):
    """Return tau, the last i with u_i < h_i, else 0, and p_tau. Walks from the front: if all are
    accepted the end of the window decides, and the sums, not formed then, are not read."""
    chance = tl.full([rows], 1.0, tl.float64)
    share = chance
    taken = tl.zeros([rows], tl.int32)
    for place in range(0, gamma):
        verified, last = place < length, place + 1 == length
        at = chances + (r * gamma + place) * 3
        chance = _next_chance(chance, at, verified)
        left = found(at + 5, verified & (place + 1 < length))  # S of this draft, by the next one
        refused = tl.where(last, 1.0, left + (1.0 - chance))
        left = tl.where(last, chance, left)
        uniform = tl.load(uniforms + r * gamma + place, mask=verified, other=1.0)
        # 0 / 0: the distributions agree to rounding, and so does the accepted rest.
        kept = verified & ((uniform * refused < left) | (refused == 0))
        taken = tl.where(kept, place + 1, taken)
        share = tl.where(kept, chance, share)
    return taken, share
