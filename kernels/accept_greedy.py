"""Verify whole windows greedily (paper, 3.1, T = 0), captured with the target's pass.

One launch. A row of logits is searched in parts, a program each; rows behind a request's verified
ones are not read. The last program of a request to arrive, told by a counter that it resets, joins
the parts: the target's choice of every row, the longest prefix of drafts that it agrees with, its
own token behind it, and all that the step hands on. The rule is `sglang_dspark.verify.greedy`.

Upstream does it in an argmax over all R (gamma + 1) rows and some ten small launches
(sglang/srt/speculative/dspark_components/dspark_verify.py, `DsparkVerifyEpilogue._accept`); that
code is what the outcome must equal. Of equal logits the lowest token is chosen; NaN
never is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAMS = 512  # that keep a GPU of 132 processors busy
_MOST_PARTS = 32
_LEAST = 4096  # tokens of a part
_ALIGNED = 16  # a part begins where a load of 16 bytes may


class Emitted(NamedTuple):
    """Written by the launch, one row a request: drafts kept [R] int64; the target's token behind
    them [R] int64; drafts kept and then dropped [R] int32, always 0; tokens emitted [R] int32;
    lengths after the step [R] int64; the tokens [R, gamma + 1] int64, valid up to those emitted."""

    accepted: Tensor
    bonus: Tensor
    dropped: Tensor
    emitted: Tensor
    new_lens: Tensor
    tokens: Tensor


class Room(NamedTuple):
    """Scratch that programs write for the last one: top logits, tokens [R, gamma + 1, parts], and a
    counter [R] int32, zero before and after a launch. Not to be shared by launches that overlap."""

    tops: Tensor
    choices: Tensor
    arrivals: Tensor


def room_for(requests: int, width: int, device: torch.device) -> Room:
    """Of `requests` windows of `width` rows, and of fewer."""
    shape = (requests, width, _MOST_PARTS)
    return Room(
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.zeros(requests, dtype=torch.int32, device=device),
    )


def why_not(window: Tensor, rows: Tensor, logits: Tensor, out: Emitted, room: Room) -> str | None:
    """Return what the operator does not support, in one line; None if it supports all."""
    requests, width = window.shape
    if logits.dtype not in TYPES or logits.dim() != 2 or logits.stride(1) != 1:
        return f"logits must be rows in {', '.join(map(str, TYPES))}: {logits.dtype}"
    if logits.shape[0] < requests * width:
        return f"{requests} windows of {width} rows need more logits than {logits.shape[0]} rows"
    if window.dtype != torch.int64 or window.stride(1) != 1 or len(rows) < requests:
        return f"windows must be [R, gamma + 1] int64, and rows [R]: {window.dtype}"
    if room.tops.shape[0] < requests or room.tops.shape[1] < width:
        return f"room for {tuple(room.tops.shape[:2])} is too small for {(requests, width)}"
    wanted = (torch.int64, torch.int64, torch.int32, torch.int32, torch.int64, torch.int64)
    if tuple(each.dtype for each in out) != wanted or not out.tokens.is_contiguous():
        return f"outputs must be {wanted}, tokens contiguous"
    return None


def accept_greedy_triton(
    window: Tensor, rows: Tensor, logits: Tensor, lens: Tensor, out: Emitted, room: Room
) -> None:
    """Write what each request of a greedy step emits.

    window: [R, gamma + 1] int64, anchors and drafts. rows: [R] integers, how many of them are
    verified; a slot without a request has 0. logits: [R (gamma + 1) or more, V] of the target.
    lens: [R] integers, lengths before the step. out: written. room: of `room_for`.
    Raises ValueError where `why_not` says so.
    """
    reason = why_not(window, rows, logits, out, room)
    if reason is not None:
        raise ValueError(f"accept_greedy: {reason}")
    requests, width = window.shape
    vocab = logits.shape[1]
    parts = parts_of(requests * width, vocab)
    _accept_greedy_kernel[(requests, width, parts)](
        window,
        rows,
        logits,
        lens,
        *room,
        *out,
        vocab,
        width,
        window.stride(0),
        logits.stride(0),
        _ALIGNED * triton.cdiv(vocab, _ALIGNED * parts),
        parts=parts,
        places=triton.next_power_of_2(width),
        block=min(2048, triton.next_power_of_2(vocab)),
        num_warps=8,
    )


def parts_of(rows: int, vocab: int) -> int:
    """Parts of a row, a power of two: enough programs, none with next to nothing to read."""
    parts = 1
    while parts < _MOST_PARTS and rows * parts < _PROGRAMS and vocab >= 2 * parts * _LEAST:
        parts *= 2
    return parts


def accept_greedy_torch(window: Tensor, rows: Tensor, logits: Tensor, lens: Tensor) -> Emitted:
    """The reference of `accept_greedy_triton`; the same arguments, new outputs, any device."""
    requests, width = window.shape
    searched = logits[: requests * width].float()
    searched = torch.where(searched.isnan(), float("-inf"), searched)
    target = searched.argmax(-1).view(requests, width)
    places = torch.arange(width, device=window.device)
    agreed = (window[:, 1:] == target[:, :-1]) & (places[1:] < rows[:, None])
    accepted = agreed.long().cumprod(1).sum(1)
    bonus = target.gather(1, accepted[:, None])[:, 0]
    drafts = torch.nn.functional.pad(window[:, 1:], (0, 1))
    emitted = (accepted + 1).int()
    return Emitted(
        accepted,
        bonus,
        torch.zeros_like(emitted),
        emitted,
        lens.long() + emitted,
        torch.where(places == accepted[:, None], bonus[:, None], drafts),
    )


@triton.jit
def _accept_greedy_kernel(
    window, rows, logits, lens, tops, choices, arrivals,
    accepted, bonus, dropped, emitted, new_lens, tokens,
    vocab, width, window_stride, row_stride, part,
    parts: tl.constexpr, places: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    r, place, own = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.minimum(tl.maximum(tl.load(rows + r).to(tl.int32), 1), width)
    if place < length:
        at = (r * width + place).to(tl.int64)
        top, choice = _searched(logits + at * row_stride, own * part, part, vocab, block)
        tl.store(tops + at * parts + own, top)
        tl.store(choices + at * parts + own, choice)
    tl.debug_barrier()  # all of a program's findings are written before it arrives
    if tl.atomic_add(arrivals + r, 1, sem="acq_rel") == width * parts - 1:
        tl.store(arrivals + r, 0)
        j = tl.arange(0, places)
        target = _joined(tops, choices, (r * width + j).to(tl.int64), j < length, parts)
        draft = tl.load(window + r * window_stride + j + 1, mask=j + 1 < width, other=0)
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
    """The largest logit of tokens begin .. begin + part, and the lowest of the tokens that have it.

    Every lane keeps the first token of its own that is largest.
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
    """The target's choice of each row [places]: the lowest token of the parts with the top."""
    part = tl.arange(0, parts)
    found = at[:, None] * parts + part[None, :]
    top = tl.load(tops + found, mask=inside[:, None], other=float("-inf"))
    choice = tl.load(choices + found, mask=inside[:, None], other=0)
    return tl.min(tl.where(top == tl.max(top, 1)[:, None], choice, 2147483647), 1)
