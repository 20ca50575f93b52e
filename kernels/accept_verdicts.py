"""Judge each row of a window and draw the token after the accepted drafts.

The common part of `accept_sampled.py` and `accept_block.py`.

A program has a row of each of its requests' windows. Its findings, 8 float64 a row, suffice for a
later program to read the row's logits again as the same distribution.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dspark.kernels.accept_rows import (
    draw,
    race,
    room_at,
    softmax,
    tally,
    threshold,
    weight_of,
)

FINDINGS = 8  # float64 for each row


@triton.jit
def windows_of(lengths, skipped, group, requests, gamma, rows: tl.constexpr):
    """Return requests of a group [rows] int64 and their verify lengths [rows].

    -1 for no request, or for one that `skipped`, [R] uint8 or None, marks."""
    r = (group * rows + tl.arange(0, rows)).to(tl.int64)
    length = tl.load(lengths + r, mask=r < requests, other=-1).to(tl.int32)
    inside = r < requests
    inside &= ~flagged(skipped, r, inside)
    # An invalid length must not give an invalid address.
    return r, tl.where(inside, tl.minimum(tl.maximum(length, 0), gamma), -1)


@triton.jit
def judge(
    r, place, length, gamma, drafts, target, draft, cuts, accept_uniforms, greedy, seeds, findings,
    cut: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write findings of row `place` of each request's window: verdict on the draft; the choice if
    no token is drawn, else -1; max, 1 / sum, key and room of p_t; max and 1 / sum of p_d. Returns
    the draft's probability in p_t and p_d, float64."""
    logits, temperatures, row_stride, vocab = target
    active, verified = place <= length, place < length
    base = (r * (gamma + 1) + place) * row_stride
    token = tl.load(drafts + r * gamma + place, mask=verified, other=-1).to(tl.int32)
    argmax = flagged(greedy, r, active)
    temperature = tl.load(temperatures + r, mask=active & ~argmax, other=1.0)
    top, mass, likeliest = softmax(logits, base, active, temperature, vocab, rows, block)
    key, room, mass, own = _kept(
        (logits, base, temperature, top),
        active & ~argmax,
        verified,
        mass,
        token,
        cuts,
        r,
        vocab,
        cut,
        rows,
        block,
    )
    dist = (logits, base, temperature, top, 1.0 / mass, key, room)
    choice = tl.where(argmax, likeliest, -1)
    choice = _raced(dist, choice, active & ~argmax, seeds, r, place, vocab, cut, rows, block)
    at = findings + (r * (gamma + 1) + place) * 8
    draft_top, draft_inverse, proposed = _proposed(
        draft, r, place, verified & (choice < 0), token, vocab, rows, block
    )
    uniform = tl.load(accept_uniforms + r * gamma + place, mask=verified, other=1.0)
    kept = tl.where(choice < 0, uniform * proposed < own / mass, choice == token)
    _note(at, active, kept, choice, top, 1.0 / mass, key, room, draft_top, draft_inverse)
    # Weighed as in the draws: equal distributions must be equal here.
    return own * (1.0 / mass), proposed


@triton.jit
def _note(at, active, kept, choice, top, inverse, key, room, draft_top, draft_inverse):
    """Store a row's findings, all of which float64 represents exactly."""
    tl.store(at, kept.to(tl.float64), mask=active)
    tl.store(at + 1, choice.to(tl.float64), mask=active)
    tl.store(at + 2, top.to(tl.float64), mask=active)
    tl.store(at + 3, inverse, mask=active)
    tl.store(at + 4, key.to(tl.float64), mask=active)
    tl.store(at + 5, room.to(tl.float64), mask=active)
    tl.store(at + 6, draft_top.to(tl.float64), mask=active)
    tl.store(at + 7, draft_inverse, mask=active)


@triton.jit
def flagged(flags, r, active):
    """Return whether flags [R] uint8 or None mark a request."""
    if flags is None:
        named = active & (r < 0)
    else:
        named = active & (tl.load(flags + r, mask=active, other=0) != 0)
    return named


@triton.jit
def _kept(
    row, active, verified, mass, token, cuts, r, vocab,
    cut: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Cut by top-k, top-p and min-p: key, room and weight, and the draft's own weight."""
    logits, base, temperature, top = row
    if cut:
        most, limit, floor = settings(cuts, r, active, mass, rows)
        key = tl.zeros([rows], tl.int32)
        counted: tl.constexpr = cuts[0] is not None
        weighed: tl.constexpr = cuts[1] is not None
        if counted or weighed:
            searched = active & ((most < vocab) | (limit < float("inf")))
            key = threshold(
                logits, base, searched, temperature, top, most, limit, vocab,
                counted, weighed, rows, block,
            )  # fmt: skip
        raised = floor > key
        key = tl.maximum(key, floor)
        above, mass, equal, lower, own = tally(
            logits, base, active, temperature, top, key, token, vocab, rows, block
        )
        room = tl.where(raised, equal, room_at(key, above, mass, equal, most, limit))
        mass += room.to(tl.float64) * key.to(tl.float32, bitcast=True).to(tl.float64)
        bits = own.to(tl.int32, bitcast=True)
        own = tl.where((bits > key) | ((bits == key) & (lower < room)), own, 0.0)
    else:
        key, room = tl.zeros([rows], tl.int32), tl.zeros([rows], tl.int32)
        own = weight_of(logits, base, verified, temperature, top, token)
    return key, room, mass, own.to(tl.float64)


@triton.jit
def settings(cuts, r, active, mass, rows: tl.constexpr):
    """Load for each request: the most tokens to keep, the weight limit before the last kept token,
    the least key. mass: the row's sum of w."""
    top_k, top_p, min_p = cuts
    most = tl.full([rows], 2147483647, tl.int32)
    if top_k is not None:
        k = tl.load(top_k + r, mask=active, other=1)
        most = tl.minimum(k, 2147483647).to(tl.int32)
    limit = tl.full([rows], float("inf"), tl.float64)
    if top_p is not None:
        share = tl.load(top_p + r, mask=active, other=1.0)
        limit = tl.where(share < 1, share.to(tl.float64) * mass, limit)
    floor = tl.zeros([rows], tl.int32)
    if min_p is not None:
        floor = tl.load(min_p + r, mask=active, other=0.0).to(tl.int32, bitcast=True)
    return most, limit, floor


@triton.jit
def _raced(
    dist, choice, active, seeds, r, place, vocab,
    cut: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Replace choice by the drawn tokens of requests that have a seed."""
    seeded, values, anchors = seeds
    if seeded is not None:
        drawn = flagged(seeded, r, active)
        if tl.max(drawn.to(tl.int32), 0) > 0:
            seed = tl.load(values + r, mask=drawn, other=0)
            position = tl.load(anchors + r, mask=drawn, other=0) + place
            first = race(dist, drawn, seed, position, vocab, cut, rows, block)
            choice = tl.where(drawn, first, choice)
    return choice


@triton.jit
def _proposed(draft, r, place, active, token, vocab, rows: tl.constexpr, block: tl.constexpr):
    """Return max and 1 / sum of the draft's row, and its own token's p_d: 1 for an argmax."""
    logits, temperatures, stride, row_stride = draft
    top = tl.zeros([rows], tl.float32)
    inverse = tl.zeros([rows], tl.float64)
    proposed = inverse + 1.0
    if logits is not None:
        base = r * stride + place * row_stride
        temperature = tl.load(temperatures + r, mask=active, other=1.0)
        top, mass, _ = softmax(logits, base, active, temperature, vocab, rows, block)
        inverse = 1.0 / mass
        proposed = weight_of(logits, base, active, temperature, top, token) * inverse
    return top, inverse, proposed


@triton.jit
def leading(findings, r, length, gamma, rows: tl.constexpr):
    """Count the drafts before the first that was rejected or not verified."""
    running = length >= 0
    taken = tl.zeros([rows], tl.int32)
    for place in range(0, gamma):
        at = findings + (r * (gamma + 1) + place) * 8
        running &= tl.load(at, mask=place < length, other=0.0, cache_modifier=".cg") > 0
        taken += running.to(tl.int32)
    return taken


@triton.jit
def carried(chance, wanted, proposed, verified):
    """Compute p_i of the block rule from p_{i-1} and draft i's probabilities in both
    distributions."""
    mass = chance * wanted
    enough = tl.where(mass > 0, 1.0, 0.0).to(tl.float64)  # 0 / 0 accepts no draft
    less = verified & (mass < proposed)
    ahead = tl.where(less, mass / tl.where(less, proposed, 1.0), enough)
    return tl.where(verified, ahead, chance)


@triton.jit
def emitted(
    r, taken, length, gamma, drafts, target, draft, share, bonus_uniforms, findings,
    cut: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Return the token after the accepted drafts. share: p of max(p p_t - p_d, 0), None for 1."""
    inside = length >= 0
    at = findings + (r * (gamma + 1) + taken) * 8
    choice = tl.load(at + 1, mask=inside, other=0.0, cache_modifier=".cg").to(tl.int32)
    drawn = inside & (choice < 0)
    if tl.max(drawn.to(tl.int32), 0) > 0:
        dist = dist_of(r, taken, drawn, gamma, target, findings)
        rejected = drawn & (taken < length)
        rest = rest_of(r, taken, rejected, gamma, drafts, draft, findings)
        uniform = tl.load(bonus_uniforms + r, mask=drawn, other=0.0)
        token = draw(
            dist, drawn, draft[0], rest, share, rejected, uniform, target[3], cut, rows, block
        )
        choice = tl.where(drawn, token, choice)
    return choice


@triton.jit
def dist_of(r, place, active, gamma, target, findings):
    """Load the arguments of `dist_tile` for row `place` of each window."""
    logits, temperatures, row_stride, _ = target
    base = (r * (gamma + 1) + place) * row_stride
    at = findings + (r * (gamma + 1) + place) * 8
    temperature = tl.load(temperatures + r, mask=active, other=1.0)
    key, room = found(at + 4, active).to(tl.int32), found(at + 5, active).to(tl.int32)
    return (
        logits,
        base,
        temperature,
        found(at + 2, active).to(tl.float32),
        found(at + 3, active),
        key,
        room,
    )


@triton.jit
def rest_of(r, place, active, gamma, drafts, draft, findings):
    """Load the arguments of `residual_tile` for row `place` of each window.

    It omits None: a function of Triton 3.6 cannot return it."""
    logits, temperatures, stride, row_stride = draft
    if logits is None:
        token = tl.load(drafts + r * gamma + place, mask=active, other=-1).to(tl.int32)
        rest = (token, token, token, token)
    else:
        at = findings + (r * (gamma + 1) + place) * 8
        temperature = tl.load(temperatures + r, mask=active, other=1.0)
        base = r * stride + place * row_stride
        rest = (base, temperature, found(at + 6, active).to(tl.float32), found(at + 7, active))
    return rest


@triton.jit
def found(at, active):
    """Load values that another program may have written."""
    return tl.load(at, mask=active, other=0.0, cache_modifier=".cg")
