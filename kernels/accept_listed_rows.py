"""Process lists of a row's likeliest tokens, for accept_listed.py: select, cut, judge, draw.

A list is a row of `weights` and of `tokens`, [rows verified, capacity], by token id; its weights
are w = exp(x / T - max), and 0 of tokens that `cut_list` drops. A row's findings, 8 float64: 0 sum
of w over the vocabulary, 1 and 2 max and 1 / sum of the draft's row, 3 the reciprocal of the sum of
kept w, 4 tokens listed, 5 and 6 the draft's probability in the target's and in the drafter's
distribution, 7 whether the list is complete; before the cuts, whether it has all tokens with w > 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dspark.kernels.accept_rows import room_at, scaled, tally, threshold
from sglang_dspark.kernels.accept_verdicts import flagged, settings


@triton.jit
def row_at(ends, r, length, place, total):
    """Return the packed row of a place in each window; ends: [R] sums of lengths + 1. At most
    total - 1: too small a bound must not give an invalid address."""
    end = tl.load(ends + r, mask=length >= 0, other=0)
    return tl.minimum(end - length - 1 + place, total - 1)


@triton.jit
def setting_of(temperatures, greedy, r, active):
    """Load each request's temperature, 1 for greedy ones."""
    value = tl.load(temperatures + r, mask=active, other=1.0)
    return tl.where(flagged(greedy, r, active), 1.0, value)


@triton.jit
def lane_key(tops, top, active, listed):
    """Return the listed-th largest w of the lanes' maxima [rows, block], as a key.

    Each lane is a part of the row, so at least `listed` tokens reach it, and seldom many more."""
    bits = tl.exp(tops - top[:, None]).to(tl.int32, bitcast=True)  # w >= 0: patterns have its order
    key = tl.zeros_like(active.to(tl.int32))
    for step in range(0, 30):  # w <= 1, whose pattern has 30 bits
        trial = key | (1 << (29 - step))
        count = tl.sum((bits >= trial[:, None]).to(tl.int32), 1)
        key = tl.where(count >= listed, trial, key)
    return tl.maximum(key, 1)  # a token with w = 0 is never drawn


@triton.jit
def gather(row, lists, at, active, key, room, rows: tl.constexpr, block: tl.constexpr):
    """List the tokens above the key, and the `room` lowest that equal it, by token id.

    Returns how many these are, of which the list has the first `capacity`, and how many others
    have w > 0."""
    logits, base, temperature, top, vocab = row
    weights, tokens, capacity = lists
    count, others = tl.zeros([rows], tl.int32), tl.zeros([rows], tl.int32)
    seen = tl.zeros([rows], tl.int32)
    for tile in range(0, vocab, block):
        w = tl.exp(scaled(logits, base, active, temperature, tile, vocab, block) - top[:, None])
        bits = w.to(tl.int32, bitcast=True)
        reached = (bits >= key[:, None]).to(tl.int32)
        others += tl.sum((bits > 0).to(tl.int32) - reached, 1)
        if tl.max(reached) > 0:  # scans are slow, and many tiles have no such token
            same = (bits == key[:, None]).to(tl.int32)
            stays = (bits > key[:, None]) | (
                (same > 0) & (seen[:, None] + tl.cumsum(same, 1) <= room[:, None])
            )
            place = count[:, None] + tl.cumsum(stays.to(tl.int32), 1) - 1
            fits = active[:, None] & stays & (place < capacity)
            token = tl.broadcast_to(tile + tl.arange(0, block)[None, :], place.shape)
            tl.store(weights + at[:, None] * capacity + place, w, mask=fits)
            tl.store(tokens + at[:, None] * capacity + place, token, mask=fits)
            seen += tl.sum(same, 1)
            listed = tl.sum(stays.to(tl.int32), 1)
            others += tl.sum(reached, 1) - listed
            count += listed
    return count, others


@triton.jit
def list_row(
    row, lists, findings, at, active, tops, listed, rows: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """List the likeliest tokens of each row: at least `listed`, or all with w > 0."""
    logits, base, temperature, top, vocab = row
    everything = tl.full([rows], 2147483647, tl.int32)
    key = lane_key(tops, top, active, listed)
    count, others = gather(row, lists, at, active, key, everything, rows, block)
    over = active & (count > lists[2])
    if tl.max(over.to(tl.int32), 0) > 0:  # equal tokens, or likely ones that share lanes
        most = tl.zeros([rows], tl.int32) + listed
        limit = tl.full([rows], float("inf"), tl.float64)
        exact = threshold(
            logits, base, over, temperature, top, most, limit, vocab, True, False, rows, block
        )
        above, _, _, _, _ = tally(  # most: in place of the unused token
            logits, base, over, temperature, top, exact, most, vocab, rows, block
        )
        again, rest = gather(row, lists, at, over, exact, most - above, rows, block)
        count, others = tl.where(over, again, count), tl.where(over, rest, others)
    tl.store(findings + at * 8 + 4, count.to(tl.float64), mask=active)
    tl.store(findings + at * 8 + 7, (others == 0).to(tl.float64), mask=active)


@triton.jit
def list_one(lists, findings, at, active, token, rows: tl.constexpr):
    """List one token of each row, the only one to choose."""
    weights, tokens, capacity = lists
    one = tl.full([rows], 1.0, tl.float32)
    tl.store(weights + at * capacity, one, mask=active)
    tl.store(tokens + at * capacity, token, mask=active)
    tl.store(findings + at * 8 + 4, one.to(tl.float64), mask=active)
    tl.store(findings + at * 8 + 7, one.to(tl.float64), mask=active)


@triton.jit
def cut_list(findings, weights, cuts, r, at, active, rows: tl.constexpr, capacity: tl.constexpr):
    """Cut by top-k, top-p and min-p, as `accept_verdicts.judge` does: w = 0 for dropped tokens.

    The list is complete if the cuts end in it: if they drop one of its tokens, or need no more."""
    lane = tl.arange(0, capacity)[None, :]
    count = tl.load(findings + at * 8 + 4, mask=active, other=0.0).to(tl.int32)
    inside = active[:, None] & (lane < count[:, None])
    to = at[:, None] * capacity + lane
    w = tl.load(weights + to, mask=inside, other=0.0)
    bits, heavy = w.to(tl.int32, bitcast=True), w.to(tl.float64)
    mass = tl.load(findings + at * 8, mask=active, other=1.0)
    most, limit, floor = settings(cuts, r, active, mass, rows)
    key = tl.zeros([rows], tl.int32)
    for step in range(0, 30):
        trial = key | (1 << (29 - step))
        reached = bits >= trial[:, None]
        enough = tl.sum(reached.to(tl.int32), 1) >= most
        enough |= tl.sum(tl.where(reached, heavy, 0.0), 1) > limit
        key = tl.where(enough, trial, key)
    ended = (key > 0) | (tl.load(findings + at * 8 + 7, mask=active, other=1.0) > 0)
    key = tl.maximum(key, floor)  # above it: fewer than top-k tokens, less weight than the limit
    larger = inside & (bits > key[:, None])
    same = (inside & (bits == key[:, None])).to(tl.int32)
    above, equal = tl.sum(larger.to(tl.int32), 1), tl.sum(same, 1)
    before = tl.sum(tl.where(larger, heavy, 0.0), 1)
    room = room_at(key, above, before, equal, most, limit)
    keep = larger | ((same > 0) & (tl.cumsum(same, 1) <= room[:, None]))
    kept = tl.sum(tl.where(keep, heavy, 0.0), 1)
    ended |= tl.sum(keep.to(tl.int32), 1) < count
    tl.store(weights + to, tl.where(keep, w, 0.0), mask=inside)
    tl.store(findings + at * 8 + 3, tl.where(kept > 0, 1.0 / kept, 0.0), mask=active)
    tl.store(findings + at * 8 + 7, ended.to(tl.float64), mask=active)


@triton.jit
def list_of(lists, at, active, capacity: tl.constexpr):
    """Load tokens [rows, capacity] int64 of a list, and p float64, 0 where no token stays."""
    findings, weights, tokens = lists
    lane = tl.arange(0, capacity)[None, :]
    count = tl.load(findings + at * 8 + 4, mask=active, other=0.0).to(tl.int32)
    inside = active[:, None] & (lane < count[:, None])
    to = at[:, None] * capacity + lane
    token = tl.load(tokens + to, mask=inside, other=2147483647)
    w = tl.load(weights + to, mask=inside, other=0.0)
    inverse = tl.load(findings + at * 8 + 3, mask=active, other=0.0)
    return token.to(tl.int64), w.to(tl.float64) * inverse[:, None]


@triton.jit
def proposed(draft, findings, r, place, at, active, token):
    """Return p_d [rows, n] float64 of tokens [rows, n] of each draft's row, 0 if not active."""
    logits, temperatures, greedy, stride, row_stride = draft
    base = r * stride + place * row_stride
    inside = active[:, None] & (token < 2147483647)
    x = tl.load(logits + base[:, None] + token, mask=inside, other=0.0).to(tl.float32)
    temperature = setting_of(temperatures, greedy, r, active)
    x = tl.div_rn(x, tl.broadcast_to(temperature[:, None], x.shape))
    top = tl.load(findings + at * 8 + 1, mask=active, other=0.0).to(tl.float32)
    inverse = tl.load(findings + at * 8 + 2, mask=active, other=0.0)
    w = tl.where(inside, tl.exp(x - top[:, None]), 0.0)
    return w.to(tl.float64) * inverse[:, None]


@triton.jit
def residual(p, token, draft, findings, drafts, r, place, at, share, active, gamma):
    """Return max(share p - p_d, 0) [rows, capacity] of row `place` of each window; where each draft
    is an argmax, p without it."""
    logits, _, _, _, _ = draft
    if logits is None:
        drafted = tl.load(drafts + r * gamma + place, mask=active, other=-1)
        left = tl.where(token == drafted[:, None], 0.0, p)
    else:
        q = proposed(draft, findings, r, place, at, active, token)
        left = tl.maximum(share[:, None] * p - q, 0.0)
    return left


@triton.jit
def drawn(
    lists, draft, drafts, uniforms, r, place, length, at, share, gamma, capacity: tl.constexpr
):  # fmt: skip
    """Draw a token [rows] int64 of row `place` of each window by the inverse CDF in token order:
    from the residual after a rejected draft; else, or if rounding leaves no residual, from p."""
    inside = length >= 0
    token, p = list_of(lists, at, inside, capacity)
    rejected = inside & (place < length)
    left = residual(p, token, draft, lists[0], drafts, r, place, at, share, rejected, gamma)
    rejected &= tl.sum(left, 1) > 0
    p = tl.where(rejected[:, None], left, p)
    goal = tl.load(uniforms + r, mask=inside, other=0.0) * tl.sum(p, 1)
    reached = (p > 0) & (tl.cumsum(p, 1) > goal[:, None])
    first = tl.min(tl.where(reached, token, 2147483647), 1)
    last = tl.max(tl.where(p > 0, token, 0), 1)
    return tl.minimum(first, last)  # uniform * total may round up to the total
