"""Draw the token behind the accepted drafts, for `accept_sampled.py` and `accept_block.py`.

A program sums what is left of a chunk of a row, max(share p_t - p_d, 0), and p_t: of the row behind
the accepted drafts by the token rule, of each row by the block rule. The last program of a request
to arrive, told by a counter that it resets, finds the chunk where the sums cross uniform * total
and draws the token there. A list of candidates is one chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dspark.kernels.accept_tiles import (
    CHUNK_FIELDS,
    EVERY,
    IS_DENSE,
    ROW_FIELDS,
    found,
    kept,
    tile,
    weights_of,
    windows_of,
)
from sglang_dspark.kernels.accept_verdicts import carried, leading, standing


@triton.jit(do_not_specialize=["requests", "flags"])
def draw_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded, seeds, anchors,
    chunked, tokens, weights, findings, arrivals, accepted, bonus, flags, requests, gamma, vocab,
    row_stride, draft_stride, draft_row_stride, capacity,
    rows: tl.constexpr, block: tl.constexpr, chunks: tl.constexpr, narrow: tl.constexpr,
    by_block: tl.constexpr,
):  # fmt: skip
    """Write what each request keeps and the token behind it."""
    group, i, c, parts = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.cdiv(vocab, block)
    r, length = windows_of(lengths, group, requests, gamma, rows)
    drawn = found(findings + r * (gamma + 1) * ROW_FIELDS + 1, length >= 0) < 0  # none is chosen
    target = (logits, temperatures, row_stride, tokens, weights, capacity, vocab)
    draft = (drafts, draft_logits, draft_temperatures, draft_stride, draft_row_stride, flags)
    if by_block:
        share, whole = standing(findings, accept_uniforms, r, length, gamma, i, rows)
        # What may be drawn from: with the whole window kept, or nothing verified, the end's row.
        summed = drawn & tl.where(whole | (length == 0), i == length, i < length)
        row = tl.zeros([rows], tl.int32) + i
    else:
        row, share = leading(findings, r, length, gamma, rows), tl.full([rows], 1.0, tl.float64)
        summed = drawn
    at = findings + (r * (gamma + 1) + row) * ROW_FIELDS
    read = summed & ((found(at + 10, summed) < 0) | (c == 0))  # a list is the first chunk alone
    sum_left, sum_p = tl.zeros([rows], tl.float64), tl.zeros([rows], tl.float64)
    if tl.max(read.to(tl.int32), 0) > 0:
        sum_left, sum_p = _summed(
            r, row, read, length, c * block, share, gamma, target, draft, findings,
            rows, block, narrow,
        )  # fmt: skip
    at = chunked + (r * (gamma + 1) + row) * CHUNK_FIELDS * parts + c
    tl.store(at + 7 * parts, sum_left, mask=summed)
    tl.store(at + 8 * parts, sum_p, mask=summed)
    tl.debug_barrier()  # a program's sums are written before it arrives
    programs = tl.num_programs(1) * tl.num_programs(2)
    if tl.atomic_add(arrivals + group, 1, sem="acq_rel") == programs - 1:
        tl.store(arrivals + group, 0)
        if by_block:
            taken, share = _walked(
                findings, chunked, accept_uniforms, r, length, gamma, parts, rows, chunks
            )
            taken = tl.where(drawn, taken, leading(findings, r, length, gamma, rows))
        else:
            taken = row
        at = findings + (r * (gamma + 1) + taken) * ROW_FIELDS
        choice = found(at + 1, length >= 0).to(tl.int32)
        if tl.max(drawn.to(tl.int32), 0) > 0:
            uniform = tl.load(bonus_uniforms + r, mask=drawn, other=0.0)
            rejected = drawn & (taken < length)
            below, rejected, goal, chunk = _crossing(
                chunked + (r * (gamma + 1) + taken) * CHUNK_FIELDS * parts,
                drawn, rejected, uniform, parts, chunks,
            )  # fmt: skip
            drawn_token = _drawn(
                r, taken, drawn, rejected, chunk * block, share, below, goal, gamma, target, draft,
                findings, rows, block, narrow,
            )  # fmt: skip
            choice = tl.where(drawn, drawn_token, choice)
        choice = tl.minimum(tl.maximum(choice, 0), vocab - 1)  # of NaN too, an id
        tl.store(accepted + r, taken.to(tl.int64), mask=length >= 0)
        tl.store(bonus + r, choice.to(tl.int64), mask=length >= 0)


@triton.jit
def _remains(r, place, active, rejected, token, share, gamma, target, draft, findings):
    """Return of a tile its token ids, p_t and max(share p_t - p_d, 0) [rows, block] float64.

    The latter of rejected rows; an argmax draft's distribution is that token alone, at share 1.
    """
    logits, temperatures, row_stride, tokens, weights, capacity, vocab = target
    drafts, draft_logits, draft_temperatures, draft_stride, draft_row_stride, flags = draft
    row = r * (gamma + 1) + place
    at = findings + row * ROW_FIELDS
    temperature = tl.load(temperatures + r, mask=active, other=1.0)
    top, inverse = found(at + 2, active).to(tl.float32), found(at + 3, active)
    key, last = found(at + 4, active).to(tl.int32), found(at + 5, active).to(tl.int32)
    listed = found(at + 10, active).to(tl.int32)
    source = (
        logits, row * row_stride, temperature, top, tokens, weights, row * capacity, listed
    )  # fmt: skip
    ids, w = tile(source, active, token, vocab)
    p = kept(ids, w, key, last).to(tl.float64) * inverse[:, None]
    if (flags & IS_DENSE) != 0:
        warm = tl.load(draft_temperatures + r, mask=rejected, other=1.0)
        draft_top, draft_inverse = found(at + 6, rejected).to(tl.float32), found(at + 7, rejected)
        base = r * draft_stride + place * draft_row_stride
        if tl.max(listed, 0) < 0:
            w = weights_of(draft_logits, base, rejected, warm, draft_top, token, vocab)
        else:  # no more than what the cuts keep
            some = tl.where(p > 0, ids, vocab)
            w = weights_of(draft_logits, base, rejected, warm, draft_top, some, vocab)
        left = tl.maximum(share[:, None] * p - w.to(tl.float64) * draft_inverse[:, None], 0.0)
    else:
        lost = tl.load(drafts + r * gamma + place, mask=rejected, other=-1).to(tl.int32)
        left = tl.where(ids == lost[:, None], 0.0, p)
    return ids, p, left


@triton.jit
def _crossing(at, drawn, rejected, uniform, parts, chunks: tl.constexpr):
    """Return the chunk where the sums cross uniform * total, the sum in front of it, whether the
    rest is drawn from, and uniform * total; all [rows].

    From p_t itself where rounding leaves no rest.
    """
    c = tl.arange(0, chunks)
    inside = drawn[:, None] & (c < parts)[None, :]
    left = found(at[:, None] + 7 * parts + c[None, :], inside)
    p = found(at[:, None] + 8 * parts + c[None, :], inside)
    rejected &= tl.sum(left, 1) > 0
    sums = tl.where(rejected[:, None], left, p)
    goal = uniform * tl.sum(sums, 1)
    crossed = (sums > 0) & (tl.cumsum(sums, 1) > goal[:, None])
    chunk = tl.min(tl.where(crossed, c[None, :], EVERY), 1)
    # uniform * total may round up to the total.
    chunk = tl.minimum(chunk, tl.max(tl.where(sums > 0, c[None, :], 0), 1))
    below = tl.sum(tl.where(c[None, :] < chunk[:, None], sums, 0.0), 1)
    return below, rejected, goal, chunk


@triton.jit
def _summed(
    r, row, active, length, begin, share, gamma, target, draft, findings,
    rows: tl.constexpr, block: tl.constexpr, narrow: tl.constexpr,
):  # fmt: skip
    """Sum what is left of a chunk, and p_t [rows] float64, a part of it at a time."""
    left_by_lane = tl.zeros([rows, narrow], tl.float64)
    p_by_lane = tl.zeros([rows, narrow], tl.float64)
    for at in range(begin, begin + block, narrow):
        token = at + tl.arange(0, narrow)[None, :]
        _, p, left = _remains(
            r, row, active, active & (row < length), token, share, gamma, target, draft, findings
        )
        left_by_lane += left
        p_by_lane += p
    return tl.sum(left_by_lane, 1), tl.sum(p_by_lane, 1)


@triton.jit
def _drawn(
    r, row, active, rejected, begin, share, below, goal, gamma, target, draft, findings,
    rows: tl.constexpr, block: tl.constexpr, narrow: tl.constexpr,
):  # fmt: skip
    """Return the first token that brings the sum above the goal [rows], at most the last with any
    weight, from the chunk that begins at `begin` [rows]."""
    first, last = tl.full([rows], EVERY, tl.int32), tl.zeros([rows], tl.int32)
    for at in range(0, block, narrow):
        token = (begin + at)[:, None] + tl.arange(0, narrow)[None, :]
        ids, p, left = _remains(
            r, row, active, rejected, token, share, gamma, target, draft, findings
        )
        p = tl.where(rejected[:, None], left, p)
        reached = (p > 0) & (below[:, None] + tl.cumsum(p, 1) > goal[:, None])
        first = tl.minimum(first, tl.min(tl.where(reached, ids, EVERY), 1))
        last = tl.maximum(last, tl.max(tl.where(p > 0, ids, 0), 1))
        below += tl.sum(p, 1)
    return tl.minimum(first, last)


@triton.jit
def _walked(
    findings, chunked, uniforms, r, length, gamma, parts, rows: tl.constexpr, chunks: tl.constexpr
):  # fmt: skip
    """Return tau, the last i with u_i < h_i, else 0, and p_tau.

    Walked from the front: where all is kept the end of the window decides, and the sums, which
    were not formed then, do not matter.
    """
    chance = tl.full([rows], 1.0, tl.float64)
    share = chance
    taken = tl.zeros([rows], tl.int32)
    c = tl.arange(0, chunks)
    for place in range(0, gamma):
        verified, end = place < length, place + 1 == length
        chance = carried(chance, findings, r, place, length, gamma)
        at = chunked + (r * (gamma + 1) + place + 1) * CHUNK_FIELDS * parts + 7 * parts
        inside = (verified & ~end)[:, None] & (c < parts)[None, :]
        left = tl.sum(found(at[:, None] + c[None, :], inside), 1)  # S_i of i = place + 1
        refused = tl.where(end, 1.0, left + (1.0 - chance))
        left = tl.where(end, chance, left)
        uniform = tl.load(uniforms + r * gamma + place, mask=verified, other=1.0)
        # 0 / 0: the distributions agree to rounding, and so does the accepted rest.
        keep = verified & ((uniform * refused < left) | (refused == 0))
        taken = tl.where(keep, place + 1, taken)
        share = tl.where(keep, chance, share)
    return taken, share
