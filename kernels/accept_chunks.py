"""Read rows of logits a chunk a program: softmax, bins of weights, lists of candidates.

Four launches in turn, for `accept_sampled.py`. `softmax_kernel` notes maximum, sum of exponentials
and argmax of each chunk. `bins_kernel` counts the weights of each chunk by bin and, for requests
with a seed and no cut, notes the chunk's first arrival. `edge_kernel`, a program a row, finds the
last bin that the cuts can reach and where each chunk's candidates begin in the row's list.
`list_kernel` writes the candidates of rows that have no more than a list holds; chunks without
candidates are not read again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dspark.kernels.accept_tiles import (
    BINS,
    CHUNK_FIELDS,
    EVERY,
    HAS_GREEDY,
    HAS_SEEDS,
    bin_of,
    cuts_of,
    first_arrival,
    highest,
    is_set,
    largest_in,
    scaled,
    softmax,
    weights_of,
    windows_of,
)


@triton.jit(do_not_specialize=["requests", "flags"])
def softmax_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded, seeds, anchors,
    chunked, flags, requests, gamma, vocab,
    row_stride, draft_stride, draft_row_stride, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Note max, sum and argmax of the target's chunks, max and sum of the draft's behind them."""
    place, c, parts = tl.program_id(1), tl.program_id(2), tl.cdiv(vocab, block)
    r, length = windows_of(lengths, tl.program_id(0), requests, gamma, rows)
    at = chunked + (r * (gamma + 1) + place) * CHUNK_FIELDS * parts
    token = (c % parts) * block + tl.arange(0, block)[None, :]
    argmax = is_set(greedy, (flags & HAS_GREEDY) != 0, r, place <= length)
    if c < parts:
        active = place <= length
        if tl.max(active.to(tl.int32), 0) > 0:
            base = (r * (gamma + 1) + place) * row_stride
            temperature = tl.load(temperatures + r, mask=active & ~argmax, other=1.0)
            x = scaled(logits, base, active, temperature, token, vocab)
            top, index = tl.max(x, 1, return_indices=True)
            _note(at + c, parts, x, top, active)
            tl.store(at + 2 * parts + c, (c * block + index).to(tl.float64), mask=active)
    else:
        active = (place < length) & ~argmax
        if tl.max(active.to(tl.int32), 0) > 0:
            base = r * draft_stride + place * draft_row_stride
            temperature = tl.load(draft_temperatures + r, mask=active, other=1.0)
            x = scaled(draft_logits, base, active, temperature, token, vocab)
            _note(at + 3 * parts + c - parts, parts, x, tl.max(x, 1), active)


@triton.jit
def _note(at, parts, x, top, active):
    """Store a chunk's max and, relative to it, its sum of exponentials."""
    finite = tl.where(top == float("-inf"), 0.0, top)
    tl.store(at, top.to(tl.float64), mask=active)
    total = tl.sum(tl.exp(x - finite[:, None]).to(tl.float64), 1)
    tl.store(at + parts, total, mask=active)


@triton.jit(do_not_specialize=["requests", "flags"])
def bins_kernel(
    drafts, lengths, logits, temperatures, accept_uniforms, bonus_uniforms,
    top_k, top_p, min_p, draft_logits, draft_temperatures, greedy, seeded, seeds, anchors,
    chunked, counts, flags, requests, gamma, vocab,
    row_stride, rows: tl.constexpr, block: tl.constexpr, chunks: tl.constexpr,
    narrow: tl.constexpr,
):  # fmt: skip
    """Count the weights of each chunk by bin; note its first arrival."""
    place, c, parts = tl.program_id(1), tl.program_id(2), tl.cdiv(vocab, block)
    r, length = windows_of(lengths, tl.program_id(0), requests, gamma, rows)
    row = r * (gamma + 1) + place
    at = chunked + row * CHUNK_FIELDS * parts
    active = place <= length
    active &= ~is_set(greedy, (flags & HAS_GREEDY) != 0, r, active)
    _, _, _, cut = cuts_of((top_k, top_p, min_p, vocab), flags, r, active)
    raced = is_set(seeded, (flags & HAS_SEEDS) != 0, r, active & ~cut)
    temperature = tl.load(temperatures + r, mask=active, other=1.0)
    top = highest(at, cut | raced, parts, chunks)
    if tl.max(cut.to(tl.int32), 0) > 0:
        token = c * block + tl.arange(0, block)[None, :]
        w = weights_of(logits, row * row_stride, cut, temperature, top, token, vocab)
        places = bin_of(w) + BINS * tl.arange(0, rows)[:, None]
        counted = tl.histogram(tl.reshape(places, [rows * block]), rows * BINS)
        counted = tl.reshape(counted, [rows, BINS])
        to = (row * parts + c)[:, None] * BINS + tl.arange(0, BINS)[None, :]
        tl.store(counts + to, counted.to(tl.int16), mask=cut[:, None])
    if tl.max(raced.to(tl.int32), 0) > 0:
        seed = tl.load(seeds + r, mask=raced, other=0)
        position = tl.load(anchors + r, mask=raced, other=0) + place
        best, choice = tl.full([rows], float("inf"), tl.float64), tl.zeros([rows], tl.int32)
        for begin in range(c * block, (c + 1) * block, narrow):  # it needs many registers
            token = begin + tl.arange(0, narrow)[None, :]
            w = weights_of(logits, row * row_stride, raced, temperature, top, token, vocab)
            ids = tl.broadcast_to(token, w.shape)
            arrival, first = first_arrival(seed, position, ids, w)
            choice = tl.where(arrival < best, first, choice)
            best = tl.minimum(best, arrival)
        tl.store(at + 5 * parts + c, best, mask=raced)
        tl.store(at + 6 * parts + c, choice.to(tl.float64), mask=raced)


@triton.jit(do_not_specialize=["requests", "flags"])
def edge_kernel(
    lengths, top_k, top_p, min_p, greedy, chunked, counts, plan, flags, requests, gamma, vocab,
    rows: tl.constexpr, block: tl.constexpr, chunks: tl.constexpr,
):  # fmt: skip
    """Write each row's plan: the last bin listed, where the chunks' candidates begin, their number.

    A row that is not cut has bin -1 and number -1.
    """
    place, parts = tl.program_id(1), tl.cdiv(vocab, block)
    r, length = windows_of(lengths, tl.program_id(0), requests, gamma, rows)
    row = r * (gamma + 1) + place
    active = place <= length
    drawn = active & ~is_set(greedy, (flags & HAS_GREEDY) != 0, r, active)
    k, p, least, cut = cuts_of((top_k, top_p, min_p, vocab), flags, r, drawn)
    _, total = softmax(chunked + row * CHUNK_FIELDS * parts, cut, parts, chunks)
    c, bins = tl.arange(0, chunks), tl.arange(0, BINS)
    at = (row[:, None, None] * parts + c[None, :, None]) * BINS + bins[None, None, :]
    inside = cut[:, None, None] & (c < parts)[None, :, None]
    count = tl.load(counts + at, mask=inside, other=0).to(tl.int32)  # [rows, chunks, BINS]
    by_bin = tl.sum(count, 1)
    enough = tl.cumsum(by_bin, 1) >= k[:, None]
    heaviest = by_bin.to(tl.float64) * largest_in(bins)[None, :]
    tail = tl.sum(heaviest, 1)[:, None] - tl.cumsum(heaviest, 1)  # no less than weighs behind
    # 1e-5: the sum over chunks is rounded. A lower edge than need be lists more, no fewer.
    enough |= tail < ((1.0 - p.to(tl.float64) - 1e-5) * total)[:, None]
    enough |= bins[None, :] >= bin_of(least)[:, None]
    edge = tl.min(tl.where(enough, bins[None, :], 126), 1)
    edge = tl.minimum(edge, 126)  # what weighs nothing is not listed
    listed = tl.sum(tl.where(bins[None, None, :] <= edge[:, None, None], count, 0), 2)
    to = plan + row * (parts + 2)
    tl.store(to, tl.where(cut, edge, -1), mask=active)
    tl.store(to + 1, 0, mask=active)
    ends = tl.where(cut[:, None], tl.cumsum(listed, 1), -1)
    tl.store(to[:, None] + 2 + c[None, :], ends, mask=active[:, None] & (c < parts)[None, :])


@triton.jit(do_not_specialize=["requests"])
def list_kernel(
    lengths, logits, temperatures, chunked, plan, tokens, weights, requests, gamma, vocab,
    row_stride, capacity, rows: tl.constexpr, block: tl.constexpr, chunks: tl.constexpr,
):  # fmt: skip
    """Write each chunk's candidates, tokens and weights, into its row's list."""
    place, c, parts = tl.program_id(1), tl.program_id(2), tl.cdiv(vocab, block)
    r, length = windows_of(lengths, tl.program_id(0), requests, gamma, rows)
    row = r * (gamma + 1) + place
    at = plan + row * (parts + 2)
    edge = tl.load(at, mask=place <= length, other=-1)
    begin = tl.load(at + 1 + c, mask=edge >= 0, other=0)
    end = tl.load(at + 2 + c, mask=edge >= 0, other=0)
    total = tl.load(at + 1 + parts, mask=edge >= 0, other=EVERY)
    active = (end > begin) & (total <= capacity)
    if tl.max(active.to(tl.int32), 0) > 0:
        token = c * block + tl.arange(0, block)[None, :]
        temperature = tl.load(temperatures + r, mask=active, other=1.0)
        top = highest(chunked + row * CHUNK_FIELDS * parts, active, parts, chunks)
        w = weights_of(logits, row * row_stride, active, temperature, top, token, vocab)
        candidate = active[:, None] & (bin_of(w) <= edge[:, None])
        rank = begin[:, None] + tl.cumsum(candidate.to(tl.int32), 1) - 1
        candidate &= rank < capacity
        to = (row * capacity)[:, None] + rank
        tl.store(tokens + to, tl.broadcast_to(token, w.shape), mask=candidate)
        tl.store(weights + to, w, mask=candidate)
