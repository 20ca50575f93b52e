"""Process lists of a row's likeliest tokens, for accept_listed.py: cuts, residuals, draws.

A list is a row of `weights` and of `tokens`, [rows verified, listed], likeliest first; `cut_list`
leaves the weight w = exp(x / T - max) of what stays and 0 of all else. A row's findings, 8 float64:
0 sum of w over the vocabulary, 1 and 2 max and 1 / sum of the draft's row, 3 the reciprocal of the
sum of w that stays, 5 and 6 what the draft has of the target's and of the drafter's distribution,
7 whether the list is complete.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dspark.kernels.accept_verdicts import flagged, settings


@triton.jit
def row_at(ends, r, length, place, total):
    """The packed row of a place in each window; ends: [R] sums of lengths + 1. At most total - 1: a
    bound that is too small must not be an address that cannot be."""
    end = tl.load(ends + r, mask=length >= 0, other=0)
    return tl.minimum(end - length - 1 + place, total - 1)


@triton.jit
def setting_of(temperatures, greedy, r, active):
    """Each request's temperature, 1 of greedy ones."""
    value = tl.load(temperatures + r, mask=active, other=1.0)
    return tl.where(flagged(greedy, r, active), 1.0, value)


@triton.jit
def cut_list(
    source, findings, weights, tokens, cuts, r, at, active, listed,
    rows: tl.constexpr, tier: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Cut by top-k, top-p and min-p: x / T of a list becomes w, 0 of what does not stay."""
    lane = tl.arange(0, tier)[None, :]
    inside = active[:, None] & (lane < listed)
    to = at[:, None] * listed + lane
    x = tl.load(weights + to, mask=inside, other=float("-inf"))
    top = tl.max(x, 1)
    w = tl.where(inside, tl.exp(x - top[:, None]), 0.0)
    mass = tl.load(findings + at * 8, mask=active, other=1.0)
    most, limit, floor = settings(cuts, r, active, mass, rows)
    before = tl.cumsum(w.to(tl.float64), 1) - w.to(tl.float64)
    keep = inside & (lane < most[:, None]) & (before <= limit[:, None])
    keep &= w.to(tl.int32, bitcast=True) >= floor[:, None]  # w >= 0: bit patterns have its order
    kept = tl.sum(tl.where(keep, w, 0.0).to(tl.float64), 1)
    tl.store(findings + at * 8 + 3, tl.where(kept > 0, 1.0 / kept, 0.0), mask=active)
    tl.store(weights + to, tl.where(keep, w, 0.0), mask=inside)
    count = tl.sum(keep.to(tl.int32), 1)
    complete = (count < listed) | (listed == source[2])
    tl.store(findings + at * 8 + 7, complete.to(tl.float64), mask=active)
    smallest = tl.min(tl.where(keep, w, float("inf")), 1)
    next_one = tl.sum(tl.where(lane == count[:, None], w, 0.0), 1)
    # topk chooses freely among equals: where some stay and some do not, the lowest are looked up.
    tied = active & (count < listed) & (smallest > 0) & (next_one == smallest)
    if tl.max(tied.to(tl.int32), 0) > 0:
        above = tl.sum((keep & (w > smallest[:, None])).to(tl.int32), 1)
        _lowest(
            source,
            tokens + at * listed + above,
            at,
            tied,
            top,
            smallest,
            count - above,
            rows,
            block,
        )


@triton.jit
def _lowest(source, to, at, tied, top, value, room, rows: tl.constexpr, block: tl.constexpr):
    """Store the `room` lowest tokens whose w equals the value."""
    read, begin, vocab = source
    seen = tl.zeros([rows], tl.int32)
    for tile in range(0, vocab, block):
        token = tile + tl.arange(0, block)[None, :]
        inside = tied[:, None] & (token < vocab)
        x = tl.load(read + (at - begin)[:, None] * vocab + token, mask=inside, other=0.0)
        same = inside & (tl.exp(x - top[:, None]) == value[:, None])
        rank = seen[:, None] + tl.cumsum(same.to(tl.int32), 1)  # from 1
        stays = same & (rank <= room[:, None])
        tl.store(
            to[:, None] + rank - 1, tl.broadcast_to(token, same.shape).to(tl.int64), mask=stays
        )
        seen += tl.sum(same.to(tl.int32), 1)


@triton.jit
def list_of(lists, at, active, tier: tl.constexpr):
    """Tokens [rows, tier] int64 of a list, and p float64, 0 where none stays."""
    findings, weights, tokens, listed = lists
    lane = tl.arange(0, tier)[None, :]
    inside = active[:, None] & (lane < listed)
    to = at[:, None] * listed + lane
    token = tl.load(tokens + to, mask=inside, other=2147483647)
    w = tl.load(weights + to, mask=inside, other=0.0)
    inverse = tl.load(findings + at * 8 + 3, mask=active, other=0.0)
    return token, w.to(tl.float64) * inverse[:, None]


@triton.jit
def proposed(draft, findings, r, place, at, active, token):
    """p_d [rows, n] float64 of tokens [rows, n] of each draft's row, 0 of what is not active."""
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
    """max(share p - p_d, 0) [rows, tier] of row `place` of each window; where each draft is an
    argmax, p without it."""
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
    lists, draft, drafts, uniforms, r, place, length, at, share, gamma, vocab, tier: tl.constexpr
):  # fmt: skip
    """A token [rows] int64 of row `place` of each window by the inverse CDF in token order: of the
    residual behind a rejected draft, of p where none was, or where rounding leaves none."""
    inside = length >= 0
    token, p = list_of(lists, at, inside, tier)
    rejected = inside & (place < length)
    left = residual(p, token, draft, lists[0], drafts, r, place, at, share, rejected, gamma)
    rejected &= tl.sum(left, 1) > 0
    p = tl.where(rejected[:, None], left, p)
    goal = tl.load(uniforms + r, mask=inside, other=0.0) * tl.sum(p, 1)
    # The first token up to which there is more than the goal, by bisection: no list is sorted.
    low, high = at * 0 - 1, at * 0 + vocab - 1
    while tl.max(high - low, 0) > 1:
        middle = (low + high) >> 1
        enough = tl.sum(tl.where(token <= middle[:, None], p, 0.0), 1) > goal
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    last = tl.max(tl.where(p > 0, token, 0), 1)
    return tl.minimum(high, last)  # uniform * total may round up to the total
