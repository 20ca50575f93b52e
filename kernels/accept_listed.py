"""Accept sampled drafts on lists of the likeliest tokens, for steps whose requests have cuts.

The rules, settings and outcomes are those of `accept_sampled.py` (rule "token") and
`accept_block.py` ("block"), which read a row some twenty times to find its cut. Here `torch.topk`
lists the likeliest tokens of each verified row, and all else happens on the lists: a launch scales
the rows, one cuts the lists, one judges and draws. Logits are read twice.

A list is complete if the cuts drop a token of it, as they then drop all that it lacks. So a top-k
below the list's length always completes it; top-p and min-p do in most rows. A request with an
incomplete list has no outcome here, nor has one with a seed: the operator on whole rows skips the
requests that `Listed.complete` marks. Both read the same uniforms, and logits alone decide which
one judges.

Of a greedy request top-k must be 1, which makes its list its argmax. Sums are float64, weights
exp(x / T - max) float32. Of equal weights at a cut the lowest tokens stay, also those that the list
lacks.

Extra memory: 200 MiB for a chunk of rows; for each row 12 bytes a listed token and 64.
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
    proposed,
    residual,
    row_at,
    setting_of,
)
from sglang_dspark.kernels.accept_rows import scaled, softmax
from sglang_dspark.kernels.accept_sampled import GPU, Tiling, empty_outcome
from sglang_dspark.kernels.accept_verdicts import FINDINGS, carried, windows_of
from sglang_dspark.kernels.accept_windows import Windows, check

LISTS = (32, 256, 2048)  # tokens of a list: few lengths, as each compiles kernels of its own
_CHUNK = 200 << 20  # bytes of scaled rows
_WARPS = 4  # of the launches that read lists
_TIES = 1024  # tokens read at once where ties are looked up


class Listed(NamedTuple):
    """accepted, bonus: [R] int64, as `Outcome`, of complete requests. complete: [R] bool."""

    accepted: Tensor
    bonus: Tensor
    complete: Tensor


class _Lists(NamedTuple):
    """findings: [rows, FINDINGS] float64. weights: [rows, listed] float32. tokens: int64."""

    findings: Tensor
    weights: Tensor
    tokens: Tensor


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

    most: the largest top-k; None: a request has none. It chooses the length of the lists.
    rows: no fewer than the rows verified, the sum of lengths + 1. lists_of: lengths to choose from,
    powers of two. Raises ValueError on arguments that do not fit.
    """
    check(given)
    _check_lists(given, rule)
    requests, device = len(given.drafts), given.drafts.device
    complete = torch.empty(requests, dtype=torch.uint8, device=device)
    kept = Listed(*empty_outcome(requests, device), complete.view(torch.bool))
    if requests == 0:
        return kept
    vocab = given.logits.shape[1]
    needed = vocab if most is None else min(most + 1, vocab)
    tier = next((each for each in lists_of if each >= needed), lists_of[-1])
    lists = _empty_lists(rows, min(tier, vocab), device)
    ends = (given.lengths.clamp(0, given.drafts.shape[1]) + 1).cumsum(0)  # [R] int64
    _list(given, ends, lists, tier, how)
    _keep_kernel[(triton.cdiv(requests, how.requests),)](
        *_operands(given), ends, *lists, *kept[:2], complete, total=rows,
        **_sizes(given, how, lists), tier=tier,
        whole=rule == "block" and given.draft_logits is not None, num_warps=_WARPS,
    )  # fmt: skip
    return kept


def _list(given: Windows, ends: Tensor, lists: _Lists, tier: int, how: Tiling) -> None:
    """Fill the lists, as many rows at once as a chunk holds."""
    requests, gamma = given.drafts.shape
    vocab, (rows, listed) = given.logits.shape[1], lists.tokens.shape
    together = max(min(_CHUNK // (4 * vocab), rows), 1)
    scaled_rows = torch.empty((together, vocab), dtype=torch.float32, device=ends.device)
    grid = triton.cdiv(requests, how.requests), gamma + 1
    sides = 1 if given.draft_logits is None else 2  # the target's rows, the drafter's
    sizes, block = _sizes(given, how, lists), min(how.block, triton.next_power_of_2(vocab))
    for begin in range(0, rows, together):
        part = slice(begin, min(begin + together, rows))
        chunk = scaled_rows[: part.stop - begin]
        of_chunk = {"begin": begin, "count": len(chunk), "total": rows}
        _scale_kernel[(*grid, sides)](
            *_operands(given), ends, chunk, lists.findings, **of_chunk, **sizes,
            block=block, num_warps=how.num_warps,
        )  # fmt: skip
        torch.topk(chunk, listed, dim=1, out=(lists.weights[part], lists.tokens[part]))
        _cut_kernel[grid](
            *_operands(given), ends, chunk, *lists, **of_chunk, **sizes,
            tier=tier, block=min(block, _TIES), num_warps=_WARPS,
        )  # fmt: skip


def _empty_lists(rows: int, listed: int, device: torch.device) -> _Lists:
    return _Lists(
        torch.empty((rows, FINDINGS), dtype=torch.float64, device=device),
        torch.empty((rows, listed), dtype=torch.float32, device=device),
        torch.empty((rows, listed), dtype=torch.int64, device=device),
    )


def _check_lists(given: Windows, rule: str) -> None:
    if rule not in ("block", "token"):
        raise ValueError(f'accept: rule must be "block" or "token", found {rule!r}')
    if given.skipped is not None:
        raise ValueError("accept: lists skip requests with a seed alone, leave skipped out")


def _operands(given: Windows) -> tuple[Tensor | None, ...]:
    """In the order of the kernels' parameters."""
    return given.operands()[:13]


def _sizes(given: Windows, how: Tiling, lists: _Lists) -> dict[str, int]:
    requests, gamma = given.drafts.shape
    strides = (0, 0) if given.draft_logits is None else given.draft_logits.stride()[:2]
    return {
        "requests": requests,
        "gamma": gamma,
        "vocab": given.logits.shape[1],
        "row_stride": given.logits.stride(0),
        "draft_stride": strides[0],
        "draft_row_stride": strides[1],
        "listed": lists.tokens.shape[1],
        "rows": how.requests,
    }


@triton.jit(do_not_specialize=["requests", "begin", "count", "total"])
def _scale_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded,
    ends, read, findings, begin, count, total, requests, gamma, vocab,
    row_stride, draft_stride, draft_row_stride, listed, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Of each verified row: x / T to `read`, the sum of w; max and 1 / sum of its draft's row."""
    place = tl.program_id(1)
    r, length = windows_of(lengths, seeded, tl.program_id(0), requests, gamma, rows)
    at = row_at(ends, r, length, place, total)
    active = (place <= length) & (at >= begin) & (at < begin + count)
    drafter = tl.program_id(2) == 1
    active &= (place < length) | ~drafter
    if tl.max(active.to(tl.int32), 0) > 0:
        if not drafter:
            temperature = setting_of(temperatures, greedy, r, active)
            base = (r * (gamma + 1) + place) * row_stride
            _, mass, _ = softmax(logits, base, active, temperature, vocab, rows, block)
            tl.store(findings + at * 8, mass, mask=active)
            for tile in range(0, vocab, block):
                x = scaled(logits, base, active, temperature, tile, vocab, block)
                token = tile + tl.arange(0, block)[None, :]
                to = read + (at - begin)[:, None] * vocab + token
                tl.store(to, x, mask=active[:, None] & (token < vocab))
        elif draft_logits is not None:
            temperature = setting_of(draft_temperatures, greedy, r, active)
            base = r * draft_stride + place * draft_row_stride
            top, mass, _ = softmax(draft_logits, base, active, temperature, vocab, rows, block)
            tl.store(findings + at * 8 + 1, top.to(tl.float64), mask=active)
            tl.store(findings + at * 8 + 2, 1.0 / mass, mask=active)


@triton.jit(do_not_specialize=["requests", "begin", "count", "total"])
def _cut_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded,
    ends, read, findings, weights, tokens, begin, count, total, requests, gamma, vocab,
    row_stride, draft_stride, draft_row_stride, listed,
    rows: tl.constexpr, tier: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Cut each list; note what its draft has of the target's distribution and of the drafter's."""
    place = tl.program_id(1)
    r, length = windows_of(lengths, seeded, tl.program_id(0), requests, gamma, rows)
    at = row_at(ends, r, length, place, total)
    active = (place <= length) & (at >= begin) & (at < begin + count)
    if tl.max(active.to(tl.int32), 0) > 0:
        cut_list(
            (read, begin, vocab), findings, weights, tokens, (top_k, top_p, min_p),
            r, at, active, listed, rows, tier, block,
        )  # fmt: skip
        tl.debug_barrier()  # lists and findings are written before they are read
        verified = active & (place < length)
        drafted = tl.load(drafts + r * gamma + place, mask=verified, other=2147483647)[:, None]
        token, p = list_of((findings, weights, tokens, listed), at, active, tier)
        wanted = tl.sum(tl.where(token == drafted, p, 0.0), 1)
        given = wanted * 0 + 1.0  # of an argmax
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
    row_stride, draft_stride, draft_row_stride, listed,
    rows: tl.constexpr, tier: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Walk each window and draw the token behind the drafts that are kept. whole: by block."""
    r, length = windows_of(lengths, seeded, tl.program_id(0), requests, gamma, rows)
    lists = (findings, weights, tokens, listed)
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
                lists, draft, drafts, ends, r, length, place, total, chance, uniform, gamma, tier
            )
            taken = tl.where(kept, place + 1, taken)
            share = tl.where(kept, chance, share)
        else:
            running &= verified & (uniform * given < wanted)
            taken += running.to(tl.int32)
    at = row_at(ends, r, length, taken, total)
    token = drawn(
        lists, draft, drafts, bonus_uniforms, r, taken, length, at, share, gamma, vocab, tier
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
    lists, draft, drafts, ends, r, length, place, total, chance, uniform, gamma, tier: tl.constexpr
):  # fmt: skip
    """Compute whether drafts up to this one may be kept: u_i < h_i, of p_i and S_i."""
    verified, last = place < length, place + 1 == length
    at = row_at(ends, r, length, place + 1, total)
    token, p = list_of(lists, at, verified & ~last, tier)
    left = residual(
        p, token, draft, lists[0], drafts, r, place + 1, at, chance, verified & ~last, gamma
    )
    left = tl.sum(left, 1)  # S_i
    refused = tl.where(last, 1.0, left + (1.0 - chance))
    left = tl.where(last, chance, left)
    # 0 / 0: the distributions agree to rounding, and so does the accepted rest.
    return verified & ((uniform * refused < left) | (refused == 0))
