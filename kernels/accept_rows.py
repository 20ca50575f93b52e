"""Process a row of logits a tile at a time, for accept_verdicts.py: softmax, cuts, draws.

No vocabulary-sized data is kept: each pass reads the logits again and forms the weights
w = exp(x / T - max), whose bit patterns, as integers, have their order. So top-k and top-p are one
threshold, found bit by bit, each by one count and one sum over the row (as the K-th largest key in
`admission.py`); equal weights stay from the lowest token id on, as far as the cut allows.

Functions work on several rows at once, [rows, block] a tile, so that the interpreter is fast on
short rows; on a GPU a program has one row. Each lane keeps its own maxima and sums until the row
ends: operations across lanes cost more than reads. Sums over tokens are float64, w is
float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled(logits, base, active, temperature, at, vocab, block: tl.constexpr):
    """Return x / T [rows, block] float32 of tokens at, at + 1, ...; -inf past the vocabulary."""
    token = at + tl.arange(0, block)
    inside = active[:, None] & (token < vocab)[None, :]
    x = tl.load(logits + base[:, None] + token[None, :], mask=inside, other=0.0).to(tl.float32)
    x = tl.div_rn(x, tl.broadcast_to(temperature[:, None], x.shape))
    return tl.where(inside, x, float("-inf"))


@triton.jit
def softmax_lanes(
    logits, base, active, temperature, vocab, rows: tl.constexpr, block: tl.constexpr
):
    """Return for each lane [rows, block], which has every block-th token: max of x / T, the first
    token that has it, sum of exp(x / T - max)."""
    top = tl.full([rows, block], float("-inf"), tl.float32)
    total = tl.zeros([rows, block], tl.float64)
    first = tl.zeros([rows, block], tl.int32)
    for at in range(0, vocab, block):
        x = scaled(logits, base, active, temperature, at, vocab, block)
        first = tl.where(x > top, at + tl.arange(0, block)[None, :], first)
        both = tl.maximum(top, x)
        finite = tl.where(both == float("-inf"), 0.0, both)
        total = total * tl.exp(top - finite).to(tl.float64) + tl.exp(x - finite).to(tl.float64)
        top = both
    return top, first, total


@triton.jit
def softmax_of(top, total):
    """Reduce the lanes of each row to the max of x / T, 0 where all are -inf, and the sum of w."""
    high = tl.max(top, 1)
    finite = tl.where(high == float("-inf"), 0.0, high)
    return finite, tl.sum(total * tl.exp(top - finite[:, None]).to(tl.float64), 1)


@triton.jit
def likeliest_of(top, first):
    """Return the first token of each row that has the max."""
    return tl.min(tl.where(top == tl.max(top, 1)[:, None], first, 2147483647), 1)


@triton.jit
def softmax(logits, base, active, temperature, vocab, rows: tl.constexpr, block: tl.constexpr):
    """Return for each row: max of x / T, sum of w (float64), the first token that has the max."""
    top, first, total = softmax_lanes(logits, base, active, temperature, vocab, rows, block)
    finite, mass = softmax_of(top, total)
    return finite, mass, likeliest_of(top, first)


@triton.jit
def threshold(
    logits, base, active, temperature, top, top_k, limit, vocab,
    counted: tl.constexpr, weighed: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Find the largest key that top_k tokens reach, or more weight than `limit`: 0 if none does.
    counted, weighed: whether any row has a top_k, or a limit.

    Tokens at and above it contain all that the cuts keep: tokens below have at least top_k tokens
    or more than `limit` of weight before them. Two bits a pass over the row; each lane counts its
    own tokens until the pass ends.
    """
    key = tl.zeros([rows], tl.int32)
    passes = 15 * tl.max(active.to(tl.int32), 0)  # w <= 1, whose pattern has 30 bits
    for step in range(0, passes):
        bit = 28 - 2 * step
        low, middle, high = key | (1 << bit), key | (2 << bit), key | (3 << bit)
        count_low = tl.zeros([rows, block], tl.int32)
        count_middle = tl.zeros([rows, block], tl.int32)
        count_high = tl.zeros([rows, block], tl.int32)
        mass_low = tl.zeros([rows, block], tl.float64)
        mass_middle = tl.zeros([rows, block], tl.float64)
        mass_high = tl.zeros([rows, block], tl.float64)
        for at in range(0, vocab, block):
            x = scaled(logits, base, active, temperature, at, vocab, block)
            w = tl.exp(x - top[:, None])
            bits = w.to(tl.int32, bitcast=True)
            if counted:
                count_low += (bits >= low[:, None]).to(tl.int32)
                count_middle += (bits >= middle[:, None]).to(tl.int32)
                count_high += (bits >= high[:, None]).to(tl.int32)
            if weighed:
                mass_low += tl.where(bits >= low[:, None], w, 0.0).to(tl.float64)
                mass_middle += tl.where(bits >= middle[:, None], w, 0.0).to(tl.float64)
                mass_high += tl.where(bits >= high[:, None], w, 0.0).to(tl.float64)
        key = _taken(key, low, count_low, mass_low, top_k, limit)
        key = _taken(key, middle, count_middle, mass_middle, top_k, limit)
        key = _taken(key, high, count_high, mass_high, top_k, limit)
    return key


@triton.jit
def _taken(key, trial, count, mass, top_k, limit):
    """Return the trial where enough tokens or enough weight reach it; a larger trial implies all
    smaller ones."""
    enough = (tl.sum(count, 1) >= top_k) | (tl.sum(mass, 1) > limit)
    return tl.where(enough, trial, key)


@triton.jit
def tally(
    logits, base, active, temperature, top, key, token, vocab,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Count tokens above the key and their weight (float64), tokens equal to it, how many of those
    are lower than `token`, and return the token's own w."""
    above = tl.zeros([rows, block], tl.int32)
    mass = tl.zeros([rows, block], tl.float64)
    equal = tl.zeros([rows, block], tl.int32)
    lower = tl.zeros([rows, block], tl.int32)
    own = tl.zeros([rows, block], tl.float32)
    for at in range(0, vocab, block):
        x = scaled(logits, base, active, temperature, at, vocab, block)
        w = tl.exp(x - top[:, None])
        bits = w.to(tl.int32, bitcast=True)
        larger = bits > key[:, None]
        same = (bits == key[:, None]).to(tl.int32)
        above += larger.to(tl.int32)
        mass += tl.where(larger, w, 0.0).to(tl.float64)
        equal += same
        behind = (at + tl.arange(0, block))[None, :] - token[:, None]
        lower += tl.where(behind < 0, same, 0)
        own += tl.where(behind == 0, w, 0.0)
    return tl.sum(above, 1), tl.sum(mass, 1), tl.sum(equal, 1), tl.sum(lower, 1), tl.sum(own, 1)


@triton.jit
def weight_of(logits, base, known, temperature, top, token):
    """Return w [rows] float32 of one token of each row, 0 where it is not known."""
    x = tl.load(logits + base + token, mask=known, other=0.0).to(tl.float32)
    return tl.where(known, tl.exp(tl.div_rn(x, temperature) - top), 0.0)


@triton.jit
def room_at(key, above, mass, equal, top_k, limit):
    """Count the tokens equal to the key that stay: with fewer than top_k tokens and at most
    `limit` of weight before them."""
    w = key.to(tl.float32, bitcast=True).to(tl.float64)
    by_mass = tl.where(w > 0, (limit - mass) / tl.where(w > 0, w, 1.0), float("inf"))
    by_mass = tl.minimum(tl.maximum(by_mass, 0.0), equal.to(tl.float64))
    return tl.minimum(tl.minimum(top_k - above, by_mass.to(tl.int32) + 1), equal)


@triton.jit
def dist_tile(dist, active, seen, at, vocab, cut: tl.constexpr, block: tl.constexpr):
    """Return p [rows, block] float64 after the cuts, and tokens that equalled the key up to here.

    dist: logits, base, temperature, max, 1 / sum of the kept weights, key and room of each row.
    """
    logits, base, temperature, top, inverse, key, room = dist
    w = tl.exp(scaled(logits, base, active, temperature, at, vocab, block) - top[:, None])
    if cut:
        bits = w.to(tl.int32, bitcast=True)
        same = (bits == key[:, None]).to(tl.int32)
        rank = seen[:, None] + tl.cumsum(same, 1)  # from 1, by token
        stays = (bits > key[:, None]) | ((same > 0) & (rank <= room[:, None]))
        w = tl.where(stays, w, 0.0)
        seen += tl.sum(same, 1)
    return w.to(tl.float64) * inverse[:, None], seen


@triton.jit
def residual_tile(p, logits, rest, share, rejected, at, vocab, block: tl.constexpr):
    """Return max(share p - p_d, 0) of the rejected rows; of the others p, or share p.

    logits: the draft's; None where each draft is its distribution's only token, then rest[0].
    rest: base, temperature, max and 1 / sum of the draft's distribution. share: None for 1.
    """
    base, temperature, top, inverse = rest
    if logits is None:
        token = at + tl.arange(0, block)
        left = tl.where(rejected[:, None] & (token[None, :] == base[:, None]), 0.0, p)
    else:
        w = tl.exp(scaled(logits, base, rejected, temperature, at, vocab, block) - top[:, None])
        if share is not None:
            p = share[:, None] * p
        left = tl.maximum(p - w.to(tl.float64) * inverse[:, None], 0.0)
    return left


@triton.jit
def draw(
    dist, active, logits, rest, share, rejected, uniform, vocab,
    cut: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Draw a token of each row by the inverse CDF in token order: from the residual where the draft
    was rejected, from p where it was not or where rounding leaves no residual. logits, rest,
    share: as in `residual_tile`."""
    left, whole = tl.zeros([rows, block], tl.float64), tl.zeros([rows, block], tl.float64)
    seen = tl.zeros([rows], tl.int32)
    for at in range(0, vocab, block):
        p, seen = dist_tile(dist, active, seen, at, vocab, cut, block)
        left += residual_tile(p, logits, rest, share, rejected, at, vocab, block)
        whole += p
    left, whole = tl.sum(left, 1), tl.sum(whole, 1)
    rejected &= left > 0
    goal = uniform * tl.where(rejected, left, whole)
    below, seen = tl.zeros([rows], tl.float64), tl.zeros([rows], tl.int32)
    found = tl.full([rows], 2147483647, tl.int32)
    last = tl.zeros([rows, block], tl.int32)
    for at in range(0, vocab, block):
        p, seen = dist_tile(dist, active, seen, at, vocab, cut, block)
        other = residual_tile(p, logits, rest, share, rejected, at, vocab, block)
        p = tl.where(rejected[:, None], other, p)
        token = at + tl.arange(0, block)[None, :]
        last = tl.where(p > 0, token, last)
        here = tl.sum(p, 1)
        crossed = (found == 2147483647) & (below + here > goal)
        if tl.max(crossed.to(tl.int32), 0) > 0:  # in one tile of a row; else a sum suffices
            reached = (p > 0) & (below[:, None] + tl.cumsum(p, 1) > goal[:, None])
            found = tl.minimum(found, tl.min(tl.where(reached, token, 2147483647), 1))
        below += here
    return tl.minimum(found, tl.max(last, 1))  # uniform * total may round up to the total


@triton.jit
def race(
    dist, active, seed, position, vocab,
    cut: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Return the token of least e_v / p(v): `sglang_dspark.verify.seeded`'s draw at a position."""
    best = tl.full([rows], float("inf"), tl.float64)
    choice = tl.zeros([rows], tl.int32)
    seen = tl.zeros([rows], tl.int32)
    for at in range(0, vocab, block):
        p, seen = dist_tile(dist, active, seen, at, vocab, cut, block)
        arrival = waits(seed, position, at + tl.arange(0, block)) / tl.where(p > 0, p, 1.0)
        first, place = tl.min(tl.where(p > 0, arrival, float("inf")), 1, return_indices=True)
        choice = tl.where(first < best, at + place, choice)
        best = tl.minimum(best, first)
    return choice


@triton.jit
def waits(seed, position, token):
    """Compute e_v [rows, block] float64 of seed, position [rows] int64 and token [block]: -log of
    MurmurHash3 over their words, as `sglang_dspark.verify.seeded.waits`."""
    state = _mixed(seed.to(tl.uint32) * 0, seed.to(tl.uint32))
    state = _mixed(state, (seed >> 32).to(tl.uint32))
    state = _mixed(state, position.to(tl.uint32))
    state = _mixed(state[:, None], token.to(tl.uint32)[None, :]) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    hashed = (state ^ (state >> 16)).to(tl.float64)
    wait = -tl.log(hashed / 4294967295.0)
    return tl.minimum(tl.maximum(wait, 2.3283064365386963e-10), 1.7976931348623157e308)


@triton.jit
def _mixed(state, word):
    """Mix a word into a 32-bit state."""
    word = word * 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state = state ^ word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64
