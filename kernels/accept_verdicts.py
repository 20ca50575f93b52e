"""Judge each row of a window, for `accept_sampled.py`: cuts, normaliser, verdict on the draft.

A program has a row of each of its requests' windows and reads the row's candidates, or all of its
logits where the list has no space for them. Top-k and top-p are one threshold, found bit by bit, by
counts and sums (as the K-th largest key in `admission.py`): what equals it stays from the lowest
token id on, as far as there is room. Rows without cuts are judged from the sums of their chunks.

The 11 float64 that it leaves of a row are all that a later program needs to read the row as the
same distribution. Sums over tokens are float64, weights are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dspark.kernels.accept_tiles import (
    CHUNK_FIELDS,
    EVERY,
    HAS_CUTS,
    HAS_GREEDY,
    HAS_SEEDS,
    IS_DENSE,
    ROW_FIELDS,
    cuts_of,
    first_arrival,
    found,
    is_set,
    kept,
    softmax,
    tile,
    weight_of,
    windows_of,
)


@triton.jit(do_not_specialize=["requests", "flags"])
def judge_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded, seeds, anchors,
    chunked, plan, tokens, weights, findings, flags, requests, gamma, vocab, row_stride,
    draft_stride, draft_row_stride, capacity,
    rows: tl.constexpr, block: tl.constexpr, chunks: tl.constexpr, narrow: tl.constexpr,
):  # fmt: skip
    """Write the findings of row `place` of each request's window."""
    place, parts = tl.program_id(1), tl.cdiv(vocab, block)
    r, length = windows_of(lengths, tl.program_id(0), requests, gamma, rows)
    row = r * (gamma + 1) + place
    active, verified = place <= length, place < length
    if tl.max(active.to(tl.int32), 0) > 0:
        at = chunked + row * CHUNK_FIELDS * parts
        argmax = is_set(greedy, (flags & HAS_GREEDY) != 0, r, active)
        drawn = active & ~argmax
        raced = is_set(seeded, (flags & HAS_SEEDS) != 0, r, drawn)
        token = tl.load(drafts + r * gamma + place, mask=verified, other=-1).to(tl.int32)
        temperature = tl.load(temperatures + r, mask=drawn, other=1.0)
        top, mass = softmax(at, active, parts, chunks)
        base = row * row_stride
        own = weight_of(logits, base, verified, temperature, top, token)
        # The cuts.
        most, p, least, cut = cuts_of((top_k, top_p, min_p, vocab), flags, r, drawn)
        listed = tl.load(
            plan + row * (parts + 2) + 1 + parts, mask=cut & ((flags & HAS_CUTS) != 0), other=-1
        )
        span = tl.where(listed <= capacity, listed, vocab)  # tokens to read
        listed = tl.where(listed <= capacity, listed, -1)
        source = (logits, base, temperature, top, tokens, weights, row * capacity, listed)
        limit = tl.where(p < 1, p.to(tl.float64) * mass, float("inf"))
        floor = least.to(tl.int32, bitcast=True)
        key, last, weight = _threshold(source, cut, span, (most, limit, floor), vocab, rows, narrow)
        mass = tl.where(cut, weight, mass)
        own = tl.sum(kept(token[:, None], own[:, None], key, last), 1).to(tl.float64)
        # What is chosen without a draw.
        choice = tl.where(argmax, _likeliest(at, argmax, parts, chunks), -1)
        choice = tl.where(raced & ~cut, _raced(at, raced & ~cut, parts, chunks), choice)
        if tl.max((raced & cut).to(tl.int32), 0) > 0:
            seed = tl.load(seeds + r, mask=raced, other=0)
            position = tl.load(anchors + r, mask=raced, other=0) + place
            first = _race(source, raced & cut, span, key, last, seed, position, vocab, rows, narrow)
            choice = tl.where(raced & cut, first, choice)
        # What the drafter gave its token: 1 of an argmax.
        dense = verified & (choice < 0) & ((flags & IS_DENSE) != 0)
        draft_top, draft_mass = softmax(at + 3 * parts, dense, parts, chunks)
        inverse = tl.where(dense, 1.0 / tl.where(dense, draft_mass, 1.0), 0.0)
        warm = tl.load(draft_temperatures + r, mask=dense, other=1.0)
        drafted = r * draft_stride + place * draft_row_stride
        proposed = weight_of(draft_logits, drafted, dense, warm, draft_top, token) * inverse
        proposed = tl.where(dense, proposed, 1.0)
        uniform = tl.load(accept_uniforms + r * gamma + place, mask=verified, other=1.0)
        accept = tl.where(choice < 0, uniform * proposed < own / mass, choice == token)
        to = findings + row * ROW_FIELDS
        tl.store(to, accept.to(tl.float64), mask=active)
        tl.store(to + 1, choice.to(tl.float64), mask=active)
        tl.store(to + 2, top.to(tl.float64), mask=active)
        tl.store(to + 3, 1.0 / mass, mask=active)
        tl.store(to + 4, key.to(tl.float64), mask=active)
        tl.store(to + 5, last.to(tl.float64), mask=active)
        tl.store(to + 6, draft_top.to(tl.float64), mask=active)
        tl.store(to + 7, inverse, mask=active)
        # Weighed as in the draws: equal distributions must be equal here.
        tl.store(to + 8, own * (1.0 / mass), mask=active)
        tl.store(to + 9, proposed, mask=active)
        tl.store(to + 10, listed.to(tl.float64), mask=active)


@triton.jit
def _likeliest(at, active, parts, chunks: tl.constexpr):
    """Return the first token of the largest logit [rows]."""
    c = tl.arange(0, chunks)
    inside = active[:, None] & (c < parts)[None, :]
    tops = tl.load(at[:, None] + c[None, :], mask=inside, other=float("-inf"))
    index = tl.load(at[:, None] + 2 * parts + c[None, :], mask=inside, other=0.0).to(tl.int32)
    first = tl.where(inside & (tops == tl.max(tops, 1)[:, None]), index, EVERY)
    return tl.min(first, 1)


@triton.jit
def _raced(at, active, parts, chunks: tl.constexpr):
    """Return the token of the chunks' first arrival [rows], the lowest of several."""
    c = tl.arange(0, chunks)
    inside = active[:, None] & (c < parts)[None, :]
    best = tl.load(at[:, None] + 5 * parts + c[None, :], mask=inside, other=float("inf"))
    index = tl.load(at[:, None] + 6 * parts + c[None, :], mask=inside, other=0.0).to(tl.int32)
    first = tl.where(inside & (best == tl.min(best, 1)[:, None]), index, EVERY)
    return tl.min(first, 1)


@triton.jit
def _race(
    source, active, span, key, last, seed, position, vocab,
    rows: tl.constexpr, narrow: tl.constexpr,
):  # fmt: skip
    """Return the first arrival of the tokens that the cuts keep [rows]."""
    best = tl.full([rows], float("inf"), tl.float64)
    choice = tl.zeros([rows], tl.int32)
    for at in range(0, tl.max(tl.where(active, span, 0), 0), narrow):
        token, w = tile(source, active, at + tl.arange(0, narrow)[None, :], vocab)
        arrival, first = first_arrival(seed, position, token, kept(token, w, key, last))
        choice = tl.where(arrival < best, first, choice)
        best = tl.minimum(best, arrival)
    return choice


@triton.jit
def _threshold(source, active, span, cuts, vocab, rows: tl.constexpr, narrow: tl.constexpr):
    """Return the cuts of active rows as key and last token id, and the weight that they keep.

    0 and the largest id where nothing is cut.
    """
    most, limit, floor = cuts
    key = tl.zeros([rows], tl.int32)
    searched = active & ((most < vocab) | (limit < float("inf")))
    stop = tl.max(tl.where(searched, span, 0), 0)
    passes = tl.where(stop > 0, 15, 0)  # w <= 1, whose pattern has 30 bits; two bits a pass
    for step in range(0, passes):
        key = _narrowed(
            source, searched, stop, key, 28 - 2 * step, most, limit, vocab, rows, narrow
        )
    raised = floor > key
    key = tl.maximum(key, floor)
    stop = tl.max(tl.where(active, span, 0), 0)
    above = tl.zeros([rows, narrow], tl.int32)
    mass = tl.zeros([rows, narrow], tl.float64)
    equal = tl.zeros([rows, narrow], tl.int32)
    for at in range(0, stop, narrow):
        _, w = tile(source, active, at + tl.arange(0, narrow)[None, :], vocab)
        bits = w.to(tl.int32, bitcast=True)
        above += (bits > key[:, None]).to(tl.int32)
        mass += tl.where(bits > key[:, None], w, 0.0).to(tl.float64)
        equal += (bits == key[:, None]).to(tl.int32)
    above, mass, equal = tl.sum(above, 1), tl.sum(mass, 1), tl.sum(equal, 1)
    room = tl.where(raised, equal, _room(key, above, mass, equal, most, limit))
    mass += room.to(tl.float64) * key.to(tl.float32, bitcast=True).to(tl.float64)
    last = tl.where(active & (room < equal) & (key > 0), -1, EVERY)
    stop = tl.max(tl.where(last < 0, span, 0), 0)
    seen = tl.zeros([rows], tl.int32)
    for at in range(0, stop, narrow):
        token, w = tile(source, last < EVERY, at + tl.arange(0, narrow)[None, :], vocab)
        same = w.to(tl.int32, bitcast=True) == key[:, None]
        rank = seen[:, None] + tl.cumsum(same.to(tl.int32), 1)  # from 1, by token
        last = tl.maximum(last, tl.max(tl.where(same & (rank <= room[:, None]), token, -1), 1))
        seen += tl.sum(same.to(tl.int32), 1)
    return key, last, mass


@triton.jit
def _narrowed(
    source, active, stop, key, bit, most, limit, vocab, rows: tl.constexpr, narrow: tl.constexpr
):
    """Decide two bits of the largest key that `most` tokens reach, or more weight than `limit`.

    Each lane counts for itself until the pass ends.
    """
    low, middle, high = key | (1 << bit), key | (2 << bit), key | (3 << bit)
    count_low = tl.zeros([rows, narrow], tl.int32)
    count_middle = tl.zeros([rows, narrow], tl.int32)
    count_high = tl.zeros([rows, narrow], tl.int32)
    mass_low = tl.zeros([rows, narrow], tl.float64)
    mass_middle = tl.zeros([rows, narrow], tl.float64)
    mass_high = tl.zeros([rows, narrow], tl.float64)
    for at in range(0, stop, narrow):
        _, w = tile(source, active, at + tl.arange(0, narrow)[None, :], vocab)
        bits = w.to(tl.int32, bitcast=True)
        count_low += (bits >= low[:, None]).to(tl.int32)
        count_middle += (bits >= middle[:, None]).to(tl.int32)
        count_high += (bits >= high[:, None]).to(tl.int32)
        mass_low += tl.where(bits >= low[:, None], w, 0.0).to(tl.float64)
        mass_middle += tl.where(bits >= middle[:, None], w, 0.0).to(tl.float64)
        mass_high += tl.where(bits >= high[:, None], w, 0.0).to(tl.float64)
    key = _taken(key, low, count_low, mass_low, active, most, limit)
    key = _taken(key, middle, count_middle, mass_middle, active, most, limit)
    return _taken(key, high, count_high, mass_high, active, most, limit)


@triton.jit
def _taken(key, trial, count, mass, active, most, limit):
    """Return the trial where enough tokens or enough weight reach it; what reaches a larger one
    reaches a smaller one too."""
    enough = (tl.sum(count, 1) >= most) | (tl.sum(mass, 1) > limit)
    return tl.where(active & enough, trial, key)


@triton.jit
def _room(key, above, mass, equal, most, limit):
    """Count the tokens equal to the key that stay: with fewer than `most` tokens and at most
    `limit` of weight in front."""
    w = key.to(tl.float32, bitcast=True).to(tl.float64)
    by_mass = tl.where(w > 0, (limit - mass) / tl.where(w > 0, w, 1.0), float("inf"))
    by_mass = tl.minimum(tl.maximum(by_mass, 0.0), equal.to(tl.float64))
    return tl.minimum(tl.minimum(most - above, by_mass.to(tl.int32) + 1), equal)


@triton.jit
def leading(findings, r, length, gamma, rows: tl.constexpr):
    """Count drafts in front of the first that was rejected or not verified."""
    running = length >= 0
    taken = tl.zeros([rows], tl.int32)
    for place in range(0, gamma):
        at = findings + (r * (gamma + 1) + place) * ROW_FIELDS
        running &= found(at, place < length) > 0
        taken += running.to(tl.int32)
    return taken


@triton.jit
def standing(findings, uniforms, r, length, gamma, i, rows: tl.constexpr):
    """Return p_i of the block rule, and whether it keeps all of the window."""
    chance = tl.full([rows], 1.0, tl.float64)
    here = chance
    for place in range(0, gamma):
        chance = carried(chance, findings, r, place, length, gamma)
        here = tl.where(place < i, chance, here)
    last = tl.load(uniforms + r * gamma + length - 1, mask=length > 0, other=1.0)
    return here, last < chance


@triton.jit
def carried(chance, findings, r, place, length, gamma):
    """Compute p_i from p_{i-1} and draft i's probabilities in both distributions."""
    verified = place < length
    at = findings + (r * (gamma + 1) + place) * ROW_FIELDS
    mass = chance * found(at + 8, verified)
    proposed = found(at + 9, verified)
    enough = tl.where(mass > 0, 1.0, 0.0).to(tl.float64)  # 0 / 0 keeps nothing
    less = verified & (mass < proposed)
    ratio = tl.where(less, mass / tl.where(less, proposed, 1.0), enough)
    return tl.where(verified, ratio, chance)
