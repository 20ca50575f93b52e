"""Verify whole windows greedily (paper, 3.1, T = 0), captured with the target's pass.

One launch over the packed rows of the pass: a request's rows follow those of the requests
before it. A row of logits is searched in parts, a program each. The last program of a request to
arrive, found by a counter that it resets, joins the parts: the target's choice for every row, the
longest prefix of drafts that it agrees with, the bonus token, and all outputs of the
step. The rule is `sglang_dspark.verify.greedy`.

Upstream scatters the rows to windows of gamma + 1, [slots (gamma + 1), V], then runs an argmax over
all of them and about ten small launches (sglang/srt/speculative/dspark_components/dspark_verify.py,
`DsparkVerifyEpilogue.__call__`); the outcome must equal that code's. Of equal logits the
lowest token is chosen; NaN never is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAMS = 512  # enough to keep a GPU of 132 processors busy
_MOST_PARTS = 32
_LEAST = 4096  # tokens of a part
_ALIGNED = 16  # a part starts where a load of 16 bytes may


class Emitted(NamedTuple):
    """Outputs of the launch, one row a request: drafts accepted [R] int64; the target's token after
    them [R] int64; drafts accepted and then dropped [R] int32, always 0; tokens emitted [R] int32;
    lengths after the step [R] int64; the tokens [R, gamma + 1] int64, valid up to those emitted."""

    accepted: Tensor
    bonus: Tensor
    dropped: Tensor
    emitted: Tensor
    new_lens: Tensor
    tokens: Tensor


class Room(NamedTuple):
    """Scratch that programs write for the last one: top logits, tokens [R, gamma + 1, parts], and a
    counter [R] int32, zero before and after a launch. Launches that overlap must not share it."""

    tops: Tensor
    choices: Tensor
    arrivals: Tensor


def room_for(requests: int, width: int, device: torch.device) -> Room:
    """Allocate scratch for up to `requests` windows of `width` rows."""
    shape = (requests, width, _MOST_PARTS)
    return Room(
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.zeros(requests, dtype=torch.int32, device=device),
    )


def why_not(ids: Tensor, rows: Tensor, logits: Tensor, out: Emitted, room: Room) -> str | None:
    """Return an unsupported property of the arguments, in one line; None if all are supported."""
    requests, width = out.tokens.shape
    if logits.dtype not in TYPES or logits.dim() != 2 or logits.stride(1) != 1:
        return f"logits must be rows in {', '.join(map(str, TYPES))}: {logits.dtype}"
    if logits.shape[0] != len(ids):
        return f"{len(ids)} tokens need as many rows of logits, not {logits.shape[0]}"
    if ids.dtype != torch.int64 or not ids.is_contiguous() or len(rows) != requests:
        return f"tokens must be [T] int64, contiguous, and rows [{requests}]: {ids.dtype}"
    if room.tops.shape[0] < requests or room.tops.shape[1] < width:
        return f"room for {tuple(room.tops.shape[:2])} is too small for {(requests, width)}"
    wanted = (torch.int64, torch.int64, torch.int32, torch.int32, torch.int64, torch.int64)
    if tuple(each.dtype for each in out) != wanted or not out.tokens.is_contiguous():
        return f"outputs must be {wanted}, tokens contiguous"
    return None


def accept_greedy_triton(
    ids: Tensor, rows: Tensor, logits: Tensor, lens: Tensor, out: Emitted, room: Room
) -> None:
    """Accept greedily; write the outputs of each request.

    ids: [T] int64, anchors and drafts of the packed pass. rows: [R] integers, number of rows of
    each request, together at most T; a slot without a request has 0. logits: [T, V] of the
    target. lens: [R] integers, lengths before the step. out: written. room: of `room_for`.
    Raises ValueError where `why_not` returns a reason.
    """
    reason = why_not(ids, rows, logits, out, room)
    if reason is not None:
        raise ValueError(f"accept_greedy: {reason}")
    requests, width = out.tokens.shape
    vocab = logits.shape[1]
    parts = parts_of(len(ids), vocab)  # programs of other rows end at once
    _accept_greedy_kernel[(requests, width, parts)](
        ids,
        rows,
        logits,
        lens,
        *room,
        *out,
        requests,
        vocab,
        width,
        logits.stride(0),
        _ALIGNED * triton.cdiv(vocab, _ALIGNED * parts),
        parts=parts,
        lanes=triton.next_power_of_2(requests),
        places=triton.next_power_of_2(width),
        block=min(2048, triton.next_power_of_2(vocab)),
        num_warps=8,
    )


def parts_of(rows: int, vocab: int) -> int:
    """Choose the parts of a row, a power of two: enough programs, each with enough to read."""
    parts = 1
    while parts < _MOST_PARTS and rows * parts < _PROGRAMS and vocab >= 2 * parts * _LEAST:
        parts *= 2
    return parts


def accept_greedy_torch(
    ids: Tensor, rows: Tensor, logits: Tensor, lens: Tensor, width: int
) -> Emitted:
    """Compute the reference of `accept_greedy_triton`: same arguments, new outputs, any device.

    width: gamma + 1.
    """
    searched = logits.float()
    searched = torch.where(searched.isnan(), float("-inf"), searched)
    choice = torch.nn.functional.pad(searched.argmax(-1), (0, width))  # [T + width]
    places = torch.arange(width, device=ids.device)
    at = (rows.long().cumsum(0) - rows)[:, None] + places  # [R, width]
    verified = places < rows[:, None]
    target = torch.where(verified, choice[at], 0)
    drafts = torch.nn.functional.pad(ids, (0, width + 1))[at + 1]
    agreed = (drafts == target)[:, :-1] & verified[:, 1:]
    accepted = agreed.long().cumprod(1).sum(1)
    bonus = target.gather(1, accepted[:, None])[:, 0]
    emitted = (accepted + 1).int()
    return Emitted(
        accepted,
        bonus,
        torch.zeros_like(emitted),
        emitted,
        lens.long() + emitted,
        torch.where(places == accepted[:, None], bonus[:, None], drafts),
    )


@triton.jit(do_not_specialize=["requests"])
def _accept_greedy_kernel(
    ids, rows, logits, lens, tops, choices, arrivals,
    accepted, bonus, dropped, emitted, new_lens, tokens,
    requests, vocab, width, row_stride, part,
    parts: tl.constexpr, lanes: tl.constexpr, places: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    r, place, own = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, lanes)
    counts = tl.load(rows + lane, mask=lane < requests, other=0).to(tl.int32)
    begin = tl.sum(tl.where(lane < r, counts, 0), 0)
    length = tl.sum(tl.where(lane == r, counts, 0), 0)  # 0 for a slot without a request
    if place < length:
        at = (begin + place).to(tl.int64)
        top, choice = _searched(logits + at * row_stride, own * part, part, vocab, block)
        found = (r * width + place).to(tl.int64) * parts + own
        tl.store(tops + found, top)
        tl.store(choices + found, choice)
    tl.debug_barrier()  # all of a program's findings are written before it arrives
    if tl.atomic_add(arrivals + r, 1, sem="acq_rel") == width * parts - 1:
        tl.store(arrivals + r, 0)
        j = tl.arange(0, places)
        target = _joined(tops, choices, (r * width + j).to(tl.int64), j < length, parts)
        draft = tl.load(ids + begin + j + 1, mask=j + 1 < length, other=0)
        wrong = (draft != target) | (j + 1 >= length)
        kept = tl.min(tl.where(wrong, j, width), 0)
        token = tl.sum(tl.where(j == kept, target, 0), 0).to(tl.int64)
        tl.store(accepted + r, kept.to(tl.int64))
        tl.store(bonus + r, token)
        tl.store(dropped + r, 0)
        tl.store(emitted + r, kept + 1)
        tl.store(new_lens + r, tl.load(lens + r).to(tl.int64) + kept + 1)
        tl.store(tokens + r * width + j, tl.where(j == kept, token, draft), mask=j < width)


@triton.jit
def _searched(row, begin, part, vocab, block: tl.constexpr):
    """Find the largest logit of tokens begin .. begin + part, and the lowest token that has it.

    Every lane keeps the first of its tokens with the largest logit.
    """
    lane = tl.arange(0, block)
    end = tl.minimum(begin + part, vocab)
    best = tl.full([block], float("-inf"), tl.float32)
    token = tl.zeros([block], tl.int32) + begin + lane
    for at in range(begin, end, block):
        x = tl.load(row + at + lane, mask=at + lane < end, other=float("-inf")).to(tl.float32)
        better = x > best  # false for NaN
        best = tl.where(better, x, best)
        token = tl.where(better, at + lane, token)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, token, 2147483647), 0)


@triton.jit
def _joined(tops, choices, at, inside, parts: tl.constexpr):
    """Join the target's choice of each row [places]: the lowest token of the parts with the top."""
    part = tl.arange(0, parts)
    found = at[:, None] * parts + part[None, :]
    top = tl.load(tops + found, mask=inside[:, None], other=float("-inf"))
    choice = tl.load(choices + found, mask=inside[:, None], other=0)
    return tl.min(tl.where(top == tl.max(top, 1)[:, None], choice, 2147483647), 1)
