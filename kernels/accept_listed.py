"""Accept sampled drafts on lists of the likeliest tokens, for steps whose requests have cuts.

The rules, settings and outcomes are those of `accept_sampled.py` (rule "token") and
`accept_block.py` ("block"), which read a row about twenty times to find its cut. Here a launch
reads each verified row twice: for its softmax, and to list its likeliest tokens. The rest runs on
the lists: one launch cuts them, another judges and draws.

Selecting L tokens sorts no row. While a program computes the softmax, each of its lanes keeps
the maximum of its part of the row. At least L tokens, and seldom many more, reach the L-th largest
of these maxima. If they exceed a list's capacity, as with many equal tokens, the L-th
largest token is found exactly (`accept_rows.threshold`). Lists are in the order of token ids, so
they are the same in every run and on every rank.

A list is complete if the cuts end in it, as they then drop all tokens that it lacks. So a top-k up
to L always completes it; top-p and min-p do in most rows. Requests with an incomplete list or a
seed have no outcome here: the operator on whole rows skips only the requests that
`Listed.complete` marks. Both read the same uniforms, and only the logits decide which one judges.

The list of a greedy request is its argmax: tokens whose logits differ may have one weight. Sums are
float64, weights exp(x / T - max) float32. Of equal weights at a cut the lowest tokens stay.

Extra memory: for each row 8 bytes a token of capacity and 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.accept_listed_rows import (
    cut_list,
    drawn,
    list_of,
    list_one,
    list_row,
    proposed,
    residual,
    row_at,
    setting_of,
)
from sglang_dspark.kernels.accept_rows import likeliest_of, softmax, softmax_lanes, softmax_of
from sglang_dspark.kernels.accept_sampled import GPU, Tiling, empty_outcome
from sglang_dspark.kernels.accept_verdicts import FINDINGS, carried, flagged, windows_of
from sglang_dspark.kernels.accept_windows import Windows, check

LISTS = (32, 256, 2048)  # L: few values, as kernels that read lists are compiled for each

REGISTERS = 64  # of a thread, so that an SM runs two programs of 16 warps that read rows


class Listed(NamedTuple):
    """accepted, bonus: [R] int64, as `Outcome`, of complete requests. complete: [R] bool."""

    accepted: Tensor
    bonus: Tensor
    complete: Tensor


def capacity_of(listed: int) -> int:
    """Return a list's capacity in tokens: tokens of one logit, or of one lane, are listed too."""
    return max(2 * listed, min(4 * listed, 1024))


def warps_of(capacity: int) -> int:
    """Return the warps of the launches that read lists."""
    return 4 if capacity <= 1024 else 8


def accept_listed_triton(
    given: Windows,
    *,
    most: int | None,
    rows: int,
    rule: str,
    how: Tiling = GPU,
    lists_of: Sequence[int] = LISTS,
) -> Listed:
    """Accept the drafts of a step by "block" or "token", `rule`.

    most: the largest top-k; None: a request has none. It determines the length of the lists.
    rows: at least the rows verified, the sum of lengths + 1. lists_of: lengths to choose from,
    powers of two. Raises ValueError on arguments that do not fit.
    """
    check(given)
    if rule not in ("block", "token"):
        raise ValueError(f'accept: rule must be "block" or "token", found {rule!r}')
    if given.skipped is not None:
        raise ValueError("accept: lists skip requests with a seed alone, leave skipped out")
    requests, device = len(given.drafts), given.drafts.device
    complete = torch.empty(requests, dtype=torch.uint8, device=device)
    kept = Listed(*empty_outcome(requests, device), complete.view(torch.bool))
    if requests == 0:
        return kept
    vocab = given.logits.shape[1]
    needed = vocab if most is None else min(most, vocab)
    listed = next((each for each in lists_of if each >= needed), lists_of[-1])
    # Each request has a row, also where lengths below 0 count as no drafts.
    _launch(given, (*kept[:2], complete), max(rows, requests), listed, rule, how)
    return kept


def _launch(
    given: Windows,
    outcome: tuple[Tensor, Tensor, Tensor],
    rows: int,
    listed: int,
    rule: str,
    how: Tiling,
) -> None:
    """Make lists of at least `listed` tokens and write accepted, bonus and complete, `outcome`."""
    (requests, gamma), device = given.drafts.shape, given.drafts.device
    columns = triton.next_power_of_2(given.logits.shape[1])
    capacity = min(capacity_of(listed), columns)
    findings = torch.empty((rows, FINDINGS), dtype=torch.float64, device=device)
    lists = (
        torch.empty((rows, capacity), dtype=torch.float32, device=device),
        torch.empty((rows, capacity), dtype=torch.int32, device=device),
    )
    ends = (given.lengths.clamp(0, gamma) + 1).cumsum(0)  # [R] int64
    operands = (*given.operands()[:13], ends, findings, *lists)
    sizes = _sizes(given, how, rows, capacity)
    groups, whole = triton.cdiv(requests, how.requests), given.draft_logits is not None
    # Twice as many lanes as tokens listed, or a lane for each token.
    block = min(max(how.block, 2 * listed), columns)
    sides = 2 if whole else 1  # the target's rows, the drafter's
    _list_kernel[(groups, gamma + 1, sides)](
        *operands, **sizes, listed=listed, block=block, num_warps=how.num_warps, maxnreg=REGISTERS
    )
    warps = warps_of(capacity)
    _cut_kernel[(groups, gamma + 1)](*operands, **sizes, num_warps=warps)
    _keep_kernel[(groups,)](
        *operands, *outcome, **sizes, whole=rule == "block" and whole, num_warps=warps
    )


def _sizes(given: Windows, how: Tiling, rows: int, capacity: int) -> dict[str, int]:
    requests, gamma = given.drafts.shape
    strides = (0, 0) if given.draft_logits is None else given.draft_logits.stride()[:2]
    return {
        "total": rows,
        "requests": requests,
        "gamma": gamma,
        "vocab": given.logits.shape[1],
        "row_stride": given.logits.stride(0),
        "draft_stride": strides[0],
        "draft_row_stride": strides[1],
        "rows": how.requests,
        "capacity": capacity,
    }


@triton.jit(do_not_specialize=["requests", "total", "capacity", "listed"])
def _list_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded,
    ends, findings, weights, tokens, total, requests, gamma, vocab,
    row_stride, draft_stride, draft_row_stride, capacity, listed,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """List the likeliest tokens of each verified row; record the sum of w, and max and 1 / sum of
    its draft's row."""
    place = tl.program_id(1)
    r, length = windows_of(lengths, seeded, tl.program_id(0), requests, gamma, rows)
    at = row_at(ends, r, length, place, total)
    drafter = tl.program_id(2) == 1
    active = (place < length) | ((place == length) & ~drafter)
    if tl.max(active.to(tl.int32), 0) > 0:
        if not drafter:
            temperature = setting_of(temperatures, greedy, r, active)
            base = (r * (gamma + 1) + place) * row_stride
            tops, firsts, sums = softmax_lanes(
                logits, base, active, temperature, vocab, rows, block
            )
            top, mass = softmax_of(tops, sums)
            tl.store(findings + at * 8, mass, mask=active)
            row = (logits, base, temperature, top, vocab)
            lists = (weights, tokens, capacity)
            argmax = flagged(greedy, r, active)
            list_one(lists, findings, at, argmax, likeliest_of(tops, firsts), rows)
            list_row(row, lists, findings, at, active & ~argmax, tops, listed, rows, block)
        elif draft_logits is not None:
            temperature = setting_of(draft_temperatures, greedy, r, active)
            base = r * draft_stride + place * draft_row_stride
            top, mass, _ = softmax(draft_logits, base, active, temperature, vocab, rows, block)
            tl.store(findings + at * 8 + 1, top.to(tl.float64), mask=active)
            tl.store(findings + at * 8 + 2, 1.0 / mass, mask=active)


@triton.jit(do_not_specialize=["requests", "total"])
def _cut_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded,
    ends, findings, weights, tokens, total, requests, gamma, vocab,
    row_stride, draft_stride, draft_row_stride, rows: tl.constexpr, capacity: tl.constexpr,
):  # fmt: skip
    """Cut each list; record its draft's probability in the target's and drafter's distributions."""
    place = tl.program_id(1)
    r, length = windows_of(lengths, seeded, tl.program_id(0), requests, gamma, rows)
    at = row_at(ends, r, length, place, total)
    active = place <= length
    if tl.max(active.to(tl.int32), 0) > 0:
        cut_list(findings, weights, (top_k, top_p, min_p), r, at, active, rows, capacity)
        tl.debug_barrier()  # lists and findings are written before they are read
        verified = active & (place < length)
        drafted = tl.load(drafts + r * gamma + place, mask=verified, other=2147483647)[:, None]
        token, p = list_of((findings, weights, tokens), at, active, capacity)
        wanted = tl.sum(tl.where(token == drafted, p, 0.0), 1)
        given = wanted * 0 + 1.0  # for an argmax draft
        if draft_logits is not None:
            draft = (draft_logits, draft_temperatures, greedy, draft_stride, draft_row_stride)
            given = tl.sum(proposed(draft, findings, r, place, at, verified, drafted), 1)
        tl.store(findings + at * 8 + 5, wanted, mask=verified)
        tl.store(findings + at * 8 + 6, given, mask=verified)


@triton.jit(do_not_specialize=["requests", "total"])
def _keep_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded,
    ends, findings, weights, tokens, accepted, bonus, complete, total, requests, gamma, vocab,
    row_stride, draft_stride, draft_row_stride,
    rows: tl.constexpr, capacity: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Walk each window and draw the token after the accepted drafts. whole: by block."""
    r, length = windows_of(lengths, seeded, tl.program_id(0), requests, gamma, rows)
    lists = (findings, weights, tokens)
    draft = (draft_logits, draft_temperatures, greedy, draft_stride, draft_row_stride)
    taken, running = tl.zeros([rows], tl.int32), length >= 0
    chance = tl.full([rows], 1.0, tl.float64)  # p_i
    share = chance
    for place in range(0, gamma):
        verified = place < length
        at = row_at(ends, r, length, place, total)
        wanted = tl.load(findings + at * 8 + 5, mask=verified, other=0.0)
        given = tl.load(findings + at * 8 + 6, mask=verified, other=1.0)
        uniform = tl.load(accept_uniforms + r * gamma + place, mask=verified, other=1.0)
        if whole:
            chance = carried(chance, wanted, given, verified)
            kept = _kept(
                lists, draft, drafts, ends, r, length, place, total, chance, uniform, gamma,
                capacity,
            )  # fmt: skip
            taken = tl.where(kept, place + 1, taken)
            share = tl.where(kept, chance, share)
        else:
            running &= verified & (uniform * given < wanted)
            taken += running.to(tl.int32)
    at = row_at(ends, r, length, taken, total)
    token = drawn(
        lists, draft, drafts, bonus_uniforms, r, taken, length, at, share, gamma, capacity
    )
    listed_whole = _complete(findings, ends, r, length, total, gamma)
    tl.store(accepted + r, taken.to(tl.int64), mask=listed_whole)
    tl.store(bonus + r, token, mask=listed_whole)
    tl.store(complete + r, listed_whole.to(tl.uint8), mask=r < requests)


@triton.jit
def _complete(findings, ends, r, length, total, gamma):
    """Return whether each request has a complete list of every row of its window."""
    complete = length >= 0
    for place in range(0, gamma + 1):
        inside = place <= length
        at = row_at(ends, r, length, place, total)
        complete &= tl.load(findings + at * 8 + 7, mask=inside, other=1.0) > 0
    return complete


@triton.jit
def _kept(
    lists, draft, drafts, ends, r, length, place, total, chance, uniform, gamma,
    capacity: tl.constexpr,
):  # fmt: skip
    """Return whether drafts up to this one may be accepted: u_i < h_i, from p_i and S_i."""
    verified, last = place < length, place + 1 == length
    at = row_at(ends, r, length, place + 1, total)
    token, p = list_of(lists, at, verified & ~last, capacity)
    left = residual(
        p, token, draft, lists[0], drafts, r, place + 1, at, chance, verified & ~last, gamma
    )
    left = tl.sum(left, 1)  # S_i
    refused = tl.where(last, 1.0, left + (1.0 - chance))
    left = tl.where(last, chance, left)
    # 0 / 0: the distributions agree to rounding, and so does the accepted rest.
    return verified & ((uniform * refused < left) | (refused == 0))
