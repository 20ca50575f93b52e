"""Sampled verification of whole windows without a tensor of probabilities (paper, 3.1, T > 0).

One launch, a program for each request and row of its window. A program reads its row of logits a
tile at a time (`accept_rows.py`): softmax, threshold of the cuts, verdict on the row's draft. Rows
behind a request's verified ones are not read. The last program of a request to arrive, told by a
counter that it resets, finds the first rejection and draws the correction from the residual
max(p_t - p_d, 0), or the bonus from p_t.

The rules are those of `sglang_dspark.verify`, the reference: `rejection.accept_sampled` on
`sampling.sampled_distribution`, `greedy` for greedy requests, `seeded.accept_seeded` for those with
a seed. Outcomes are equal but where a uniform lies within rounding of a boundary: weights are
float32 and their sums float64 here, where torch rounds probabilities to float32.

Extra memory: 8 float64 a row, 2 int64 and a counter a request, whatever the vocabulary: 140 KiB
at 256 requests of 8 rows. Probabilities in torch take 4 * V bytes a row, several times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.accept_rows import (
    draw,
    race,
    room_at,
    softmax,
    tally,
    threshold,
    weight_of,
)
from sglang_dspark.kernels.accept_windows import Windows, check

_FINDINGS = 8  # float64 that a row leaves for the draw


class Outcome(NamedTuple):
    """accepted: [R] int64, drafts kept. bonus: [R] int64, the target's token behind them."""

    accepted: Tensor
    bonus: Tensor


class Tiling(NamedTuple):
    """requests: of a program, more than one only where rows are short. block: tokens read at once.
    Both powers of two."""

    requests: int = 1
    block: int = 2048
    num_warps: int = 8


_GPU = Tiling()


def accept_triton(given: Windows, arrivals: Tensor | None = None, how: Tiling = _GPU) -> Outcome:
    """What each request of a step emits.

    arrivals: [R or more] int32 zeros on the device, zeros again behind the launch, not to be
    shared by launches that overlap; None: made here.
    Raises ValueError on shapes or types that do not fit.
    """
    check(given, arrivals)
    requests, gamma = given.drafts.shape
    device = given.drafts.device
    if arrivals is None:
        arrivals = torch.zeros(requests, dtype=torch.int32, device=device)
    findings = torch.empty((requests, gamma + 1, _FINDINGS), dtype=torch.float64, device=device)
    found = Outcome(*(torch.empty(requests, dtype=torch.int64, device=device) for _ in range(2)))
    if requests:
        _launch(given, findings, arrivals, found, how)
    return found


def _launch(
    given: Windows, findings: Tensor, arrivals: Tensor, found: Outcome, how: Tiling
) -> None:
    requests, gamma = given.drafts.shape
    draft, vocab = given.draft_logits, given.logits.shape[1]
    flags = (None if f is None else f.view(torch.uint8) for f in (given.greedy, given.seeded))
    _accept_kernel[(triton.cdiv(requests, how.requests), gamma + 1)](
        given.drafts,
        given.lengths,
        given.logits,
        given.temperatures,
        given.accept_uniforms,
        given.bonus_uniforms,
        given.top_k,
        given.top_p,
        given.min_p,
        draft,
        given.draft_temperatures,
        *flags,
        given.seeds,
        given.anchors,
        findings,
        arrivals,
        *found,
        requests,
        gamma,
        vocab,
        given.logits.stride(0),
        *((0, 0) if draft is None else draft.stride()[:2]),
        rows=how.requests,
        block=min(how.block, triton.next_power_of_2(vocab)),
        num_warps=how.num_warps,
    )


@triton.jit(do_not_specialize=["requests"])  # compiled once, not for each kind of batch
def _accept_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded, seeds, anchors,
    findings, arrivals, accepted, bonus, requests, gamma, vocab,
    row_stride, draft_stride, draft_row_stride, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    group, place = tl.program_id(0), tl.program_id(1)
    r = (group * rows + tl.arange(0, rows)).to(tl.int64)
    length = tl.load(lengths + r, mask=r < requests, other=-1).to(tl.int32)
    # A length that cannot be must not be an address that cannot be.
    length = tl.where(r < requests, tl.minimum(tl.maximum(length, 0), gamma), -1)
    target = (logits, temperatures, row_stride, vocab)
    draft = (draft_logits, draft_temperatures, draft_stride, draft_row_stride)
    cuts = (top_k, top_p, min_p)
    if tl.max(length, 0) >= place:
        _judge(
            r, place, length, gamma, drafts, target, draft, cuts, accept_uniforms,
            greedy, (seeded, seeds, anchors), findings, rows, block,
        )  # fmt: skip
    tl.debug_barrier()  # all of a program's findings are written before it arrives
    if tl.atomic_add(arrivals + group, 1, sem="acq_rel") == gamma:
        tl.store(arrivals + group, 0)
        taken = _leading(findings, r, length, gamma, rows)
        token = _emitted(
            r, taken, length, gamma, drafts, target, draft, cuts, bonus_uniforms, findings,
            rows, block,
        )  # fmt: skip
        tl.store(accepted + r, taken.to(tl.int64), mask=length >= 0)
        tl.store(bonus + r, token.to(tl.int64), mask=length >= 0)


@triton.jit
def _judge(
    r, place, length, gamma, drafts, target, draft, cuts, accept_uniforms, greedy, seeds, findings,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Findings of row `place` of each request's window: verdict on the draft; choice where nothing
    is drawn, else -1; max, 1 / sum, key and room of p_t; max and 1 / sum of p_d."""
    logits, temperatures, row_stride, vocab = target
    active, verified = place <= length, place < length
    base = (r * (gamma + 1) + place) * row_stride
    token = tl.load(drafts + r * gamma + place, mask=verified, other=-1).to(tl.int32)
    argmax = _flag(greedy, r, active)
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
        rows,
        block,
    )
    law = (logits, base, temperature, top, 1.0 / mass, key, room)
    choice = tl.where(argmax, likeliest, -1)
    choice = _raced(law, choice, active & ~argmax, seeds, r, place, cuts, vocab, rows, block)
    at = findings + (r * (gamma + 1) + place) * 8
    draft_top, draft_inverse, proposed = _proposed(
        draft, r, place, verified & (choice < 0), token, vocab, rows, block
    )
    uniform = tl.load(accept_uniforms + r * gamma + place, mask=verified, other=1.0)
    kept = tl.where(choice < 0, uniform * proposed < own / mass, choice == token)
    _note(at, active, kept, choice, top, 1.0 / mass, key, room, draft_top, draft_inverse)


@triton.jit
def _note(at, active, kept, choice, top, inverse, key, room, draft_top, draft_inverse):
    """A row's findings, all of which float64 holds exactly."""
    tl.store(at, kept.to(tl.float64), mask=active)
    tl.store(at + 1, choice.to(tl.float64), mask=active)
    tl.store(at + 2, top.to(tl.float64), mask=active)
    tl.store(at + 3, inverse, mask=active)
    tl.store(at + 4, key.to(tl.float64), mask=active)
    tl.store(at + 5, room.to(tl.float64), mask=active)
    tl.store(at + 6, draft_top.to(tl.float64), mask=active)
    tl.store(at + 7, draft_inverse, mask=active)


@triton.jit
def _flag(flags, r, active):
    """Whether a request is one of those that flags [R] uint8 or None name."""
    if flags is None:
        named = active & (r < 0)
    else:
        named = active & (tl.load(flags + r, mask=active, other=0) != 0)
    return named


@triton.jit
def _is_cut(cuts):
    return cuts[0] is not None or cuts[1] is not None or cuts[2] is not None


@triton.jit
def _kept(
    row, active, verified, mass, token, cuts, r, vocab, rows: tl.constexpr, block: tl.constexpr
):
    """What top-k, top-p and min-p leave: key, room and weight, and what the draft has of it."""
    logits, base, temperature, top = row
    if _is_cut(cuts):
        most, limit, floor = _settings(cuts, r, active, mass, rows)
        key = tl.zeros([rows], tl.int32)
        if cuts[0] is not None or cuts[1] is not None:
            searched = active & ((most < vocab) | (limit < float("inf")))
            key = threshold(
                logits, base, searched, temperature, top, most, limit, vocab, rows, block
            )
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
def _settings(cuts, r, active, mass, rows: tl.constexpr):
    """Of each request: how many tokens stay at most, weight in front of the last that stays, least
    key. mass: the row's sum of w."""
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
    law, choice, active, seeds, r, place, cuts, vocab, rows: tl.constexpr, block: tl.constexpr
):
    """choice, with the tokens of requests that have a seed."""
    seeded, values, anchors = seeds
    if seeded is not None:
        drawn = _flag(seeded, r, active)
        if tl.max(drawn.to(tl.int32), 0) > 0:
            seed = tl.load(values + r, mask=drawn, other=0)
            position = tl.load(anchors + r, mask=drawn, other=0) + place
            first = race(law, drawn, seed, position, vocab, _is_cut(cuts), rows, block)
            choice = tl.where(drawn, first, choice)
    return choice


@triton.jit
def _proposed(draft, r, place, active, token, vocab, rows: tl.constexpr, block: tl.constexpr):
    """Max and 1 / sum of the draft's row, and what it gives its own token: 1 of an argmax."""
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
def _leading(findings, r, length, gamma, rows: tl.constexpr):
    """Drafts in front of the first that was rejected or not verified."""
    running = length >= 0
    taken = tl.zeros([rows], tl.int32)
    for place in range(0, gamma):
        at = findings + (r * (gamma + 1) + place) * 8
        running &= tl.load(at, mask=place < length, other=0.0, cache_modifier=".cg") > 0
        taken += running.to(tl.int32)
    return taken


@triton.jit
def _emitted(
    r, taken, length, gamma, drafts, target, draft, cuts, bonus_uniforms, findings,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The token behind the accepted drafts."""
    inside = length >= 0
    at = findings + (r * (gamma + 1) + taken) * 8
    choice = tl.load(at + 1, mask=inside, other=0.0, cache_modifier=".cg").to(tl.int32)
    drawn = inside & (choice < 0)
    if tl.max(drawn.to(tl.int32), 0) > 0:
        logits, temperatures, row_stride, vocab = target
        base = (r * (gamma + 1) + taken) * row_stride
        temperature = tl.load(temperatures + r, mask=drawn, other=1.0)
        top = _found(at + 2, drawn).to(tl.float32)
        key, room = _found(at + 4, drawn).to(tl.int32), _found(at + 5, drawn).to(tl.int32)
        law = (logits, base, temperature, top, _found(at + 3, drawn), key, room)
        logits, temperatures, stride, row_stride = draft
        rejected = drawn & (taken < length)
        token = tl.load(drafts + r * gamma + taken, mask=rejected, other=-1).to(tl.int32)
        if logits is None:
            rest = (logits, token, 0, 0, 0)
        else:
            temperature = tl.load(temperatures + r, mask=rejected, other=1.0)
            top = _found(at + 6, drawn).to(tl.float32)
            rest = (
                logits,
                r * stride + taken * row_stride,
                temperature,
                top,
                _found(at + 7, drawn),
            )
        uniform = tl.load(bonus_uniforms + r, mask=drawn, other=0.0)
        token = draw(law, drawn, rest, rejected, uniform, vocab, _is_cut(cuts), rows, block)
        choice = tl.where(drawn, token, choice)
    return choice


@triton.jit
def _found(at, active):
    return tl.load(at, mask=active, other=0.0, cache_modifier=".cg")
