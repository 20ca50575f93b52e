"""Verify sampled windows without a tensor of probabilities (paper, 3.1, T > 0).

One launch, a program for each request and row of its window. A program reads its row of logits a
tile at a time (`accept_verdicts.py`): softmax, threshold of the cuts, verdict on the row's draft.
Rows after a request's verified ones are not read. The last program of a request to arrive, found
by a counter that it resets, finds the first rejection and draws the correction from the residual
max(p_t - p_d, 0), or the bonus from p_t. `accept_block.py` judges windows as a whole.

The rules are those of `sglang_dspark.verify`, the reference: `rejection.accept_sampled` on
`sampling.sampled_distribution`, `greedy` for greedy requests, `seeded.accept_seeded` for those with
a seed. Outcomes are equal except where a uniform lies within rounding of a boundary: weights are
float32 and their sums float64 here, where torch rounds probabilities to float32.

Extra memory: 8 float64 a row, 2 int64 and a counter a request, for any vocabulary: 140 KiB
at 256 requests of 8 rows. Probabilities in torch use 4 * V bytes a row, several times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.accept_verdicts import (
    FINDINGS,
    emitted,
    judge,
    leading,
    windows_of,
)
from sglang_dspark.kernels.accept_windows import Windows, check


class Outcome(NamedTuple):
    """accepted: [R] int64, drafts accepted. bonus: [R] int64, the target's token after them."""

    accepted: Tensor
    bonus: Tensor


class Tiling(NamedTuple):
    """requests: of a program, more than one only for short rows. block: tokens read at once.
    Both powers of two."""

    requests: int = 1
    block: int = 4096
    num_warps: int = 16


GPU = Tiling()


def empty_outcome(requests: int, device: torch.device) -> Outcome:
    """Allocate an outcome."""
    return Outcome(*(torch.empty(requests, dtype=torch.int64, device=device) for _ in range(2)))


def accept_triton(
    given: Windows,
    arrivals: Tensor | None = None,
    how: Tiling = GPU,
    into: Outcome | None = None,
) -> Outcome:
    """Accept the drafts of a step by the token rule.

    arrivals: [R or more] int32 zeros on the device, zeros again after the launch; launches that
    overlap must not share it; None: made here. into: is written to and returned, except for the
    requests that `given.skipped` marks; None: made here.
    Raises ValueError on shapes or types that do not fit.
    """
    check(given, arrivals)
    requests, gamma = given.drafts.shape
    device = given.drafts.device
    if arrivals is None:
        arrivals = torch.zeros(requests, dtype=torch.int32, device=device)
    findings = torch.empty((requests, gamma + 1, FINDINGS), dtype=torch.float64, device=device)
    found = into or empty_outcome(requests, device)
    if requests:
        _launch(given, findings, arrivals, found, how)
    return found


def _launch(
    given: Windows, findings: Tensor, arrivals: Tensor, found: Outcome, how: Tiling
) -> None:
    requests, gamma = given.drafts.shape
    draft, vocab = given.draft_logits, given.logits.shape[1]
    _accept_kernel[(triton.cdiv(requests, how.requests), gamma + 1)](
        *given.operands(),
        findings,
        arrivals,
        *found,
        requests,
        gamma,
        vocab,
        given.logits.stride(0),
        *((0, 0) if draft is None else draft.stride()[:2]),
        rows=how.requests,
        block=min(how.block, triton.next_power_of_2(vocab)),
        num_warps=how.num_warps,
    )


@triton.jit(do_not_specialize=["requests"])  # compiled once, not for each kind of batch
def _accept_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded, seeds, anchors, skipped,
    findings, arrivals, accepted, bonus, requests, gamma, vocab,
    row_stride, draft_stride, draft_row_stride, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    group, place = tl.program_id(0), tl.program_id(1)
    r, length = windows_of(lengths, skipped, group, requests, gamma, rows)
    target = (logits, temperatures, row_stride, vocab)
    draft = (draft_logits, draft_temperatures, draft_stride, draft_row_stride)
    cut: tl.constexpr = top_k is not None or top_p is not None or min_p is not None
    if tl.max(length, 0) >= place:
        judge(
            r, place, length, gamma, drafts, target, draft, (top_k, top_p, min_p),
            accept_uniforms, greedy, (seeded, seeds, anchors), findings, cut, rows, block,
        )  # fmt: skip
    tl.debug_barrier()  # all of a program's findings are written before it arrives
    if tl.atomic_add(arrivals + group, 1, sem="acq_rel") == gamma:
        tl.store(arrivals + group, 0)
        taken = leading(findings, r, length, gamma, rows)
        token = emitted(
            r, taken, length, gamma, drafts, target, draft, None, bonus_uniforms, findings,
            cut, rows, block,
        )  # fmt: skip
        tl.store(accepted + r, taken.to(tl.int64), mask=length >= 0)
        tl.store(bonus + r, token.to(tl.int64), mask=length >= 0)
