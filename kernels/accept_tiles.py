"""Read tiles of a row of logits or of its candidates, for the kernels of `accept_sampled.py`.

A token's weight is w = exp(x / T - max), float32; the bit patterns of weights, as integers, have
their order. The cuts of a row are one smallest pattern, `key`, and the last token id that stays of
those that equal it, `last`, so a program can judge any tile of the row without the others.

A row's tokens are read from its logits, or, where the cuts keep few, from a list of candidates in
token order that holds all of the kept ones. Functions work on [rows, block]: several requests at
once let the interpreter be fast on short rows; on a GPU a program has one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dspark.kernels.accept_windows import DENSE, GREEDY, MIN_P, SEEDED, TOP_K, TOP_P

ROW_FIELDS = tl.constexpr(11)  # float64 of a row, by `accept_verdicts.py`
CHUNK_FIELDS = tl.constexpr(9)  # float64 of a chunk, by `accept_chunks.py` and `accept_draws.py`
BINS = tl.constexpr(128)  # of a chunk's weights
EVERY = tl.constexpr(2147483647)
HAS_TOP_K, HAS_TOP_P = tl.constexpr(TOP_K), tl.constexpr(TOP_P)
HAS_MIN_P, HAS_GREEDY = tl.constexpr(MIN_P), tl.constexpr(GREEDY)
HAS_SEEDS = tl.constexpr(SEEDED)
HAS_CUTS = tl.constexpr(TOP_K | TOP_P | MIN_P)
IS_DENSE = tl.constexpr(DENSE)


@triton.jit
def windows_of(lengths, group, requests, gamma, rows: tl.constexpr):
    """Return the requests of a group [rows] int64 and their verify lengths [rows], -1 for none."""
    r = (group * rows + tl.arange(0, rows)).to(tl.int64)
    length = tl.load(lengths + r, mask=r < requests, other=-1).to(tl.int32)
    # An invalid length must not become an invalid address.
    return r, tl.where(r < requests, tl.minimum(tl.maximum(length, 0), gamma), -1)


@triton.jit
def is_set(values, given, r, active):
    """Return whether a flag [R] uint8 is set, of active requests; not read where not given."""
    return active & (tl.load(values + r, mask=active & given, other=0) != 0)


@triton.jit
def cuts_of(cuts, flags, r, active):
    """Load top-k (int32), top-p and min-p (float32) of requests, and whether any of them cuts.

    An absent setting is not read.
    """
    top_k, top_p, min_p, vocab = cuts
    k = tl.load(top_k + r, mask=active & ((flags & HAS_TOP_K) != 0), other=EVERY)
    k = tl.minimum(k, EVERY).to(tl.int32)
    p = tl.load(top_p + r, mask=active & ((flags & HAS_TOP_P) != 0), other=1.0)
    least = tl.load(min_p + r, mask=active & ((flags & HAS_MIN_P) != 0), other=0.0)
    return k, p, least, active & ((k < vocab) | (p < 1) | (least > 0))


@triton.jit
def scaled(logits, base, active, temperature, token, vocab):
    """Return x / T [rows, block] float32; -inf of inactive rows and behind the vocabulary."""
    inside = active[:, None] & (token < vocab)
    x = tl.load(logits + base[:, None] + token, mask=inside, other=0.0).to(tl.float32)
    x = tl.div_rn(x, tl.broadcast_to(temperature[:, None], x.shape))
    return tl.where(inside, x, float("-inf"))


@triton.jit
def weights_of(logits, base, active, temperature, top, token, vocab):
    """Return w [rows, block] float32."""
    return tl.exp(scaled(logits, base, active, temperature, token, vocab) - top[:, None])


@triton.jit
def weight_of(logits, base, active, temperature, top, token):
    """Return w [rows] float32 of one token of each row; 0 of inactive rows."""
    x = tl.load(logits + base + token, mask=active, other=0.0).to(tl.float32)
    return tl.where(active, tl.exp(tl.div_rn(x, temperature) - top), 0.0)


@triton.jit
def highest(tops, active, parts, chunks: tl.constexpr):
    """Return the maximum of each row's chunks [rows] float32, 0 where all are -inf."""
    c = tl.arange(0, chunks)
    inside = active[:, None] & (c < parts)[None, :]
    top = tl.max(tl.load(tops[:, None] + c[None, :], mask=inside, other=float("-inf")), 1)
    return tl.where(top == float("-inf"), 0.0, top).to(tl.float32)


@triton.jit
def softmax(tops, active, parts, chunks: tl.constexpr):
    """Return max [rows] float32 and sum of w [rows] float64 from those of each row's chunks."""
    c = tl.arange(0, chunks)
    inside = active[:, None] & (c < parts)[None, :]
    at = tops[:, None] + c[None, :]
    top = highest(tops, active, parts, chunks)
    own = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    total = tl.load(at + parts, mask=inside, other=0.0)
    return top, tl.sum(total * tl.exp(own - top[:, None]).to(tl.float64), 1)


@triton.jit
def bin_of(w):
    """Return the bin of weights, 0 for the largest: four to an octave down to 2^-16, then one to
    two octaves; 127 for 0 and NaN. Equal weights share a bin, smaller ones have no smaller bin."""
    behind = 0x3F800000 - w.to(tl.int32, bitcast=True)  # from the pattern of 1
    coarse = 64 + ((behind - (16 << 23)) >> 24)
    found = tl.where(behind < (16 << 23), behind >> 21, coarse)
    return tl.where(w > 0, tl.minimum(tl.maximum(found, 0), 126), 127)


@triton.jit
def largest_in(bins):
    """Return the largest weight of each bin, float64."""
    behind = tl.where(bins < 64, bins << 21, (16 << 23) + ((bins - 64) << 24))
    return tl.where(
        bins < 120, (0x3F800000 - behind).to(tl.float32, bitcast=True).to(tl.float64), 0.0
    )


@triton.jit
def tile(row, active, token, vocab):
    """Return token ids and w [rows, block] of a tile; w is 0 where there is none.

    row: logits, base, temperature, max; lists of tokens and weights, their base and length, -1 for
    a row that is read from its logits. token: ids, of a list positions.
    """
    logits, base, temperature, top, tokens, weights, list_base, listed = row
    inside = (active & (listed >= 0))[:, None] & (token < listed[:, None])
    ids = tl.broadcast_to(token, inside.shape)
    w = tl.zeros(inside.shape, tl.float32)
    read = active & (listed < 0)
    if tl.max(read.to(tl.int32), 0) > 0:
        w = weights_of(logits, base, read, temperature, top, ids, vocab)
    if tl.max((active & (listed >= 0)).to(tl.int32), 0) > 0:
        at = list_base[:, None] + token
        ids = tl.where(listed[:, None] < 0, ids, tl.load(tokens + at, mask=inside, other=0))
        w = tl.where(listed[:, None] < 0, w, tl.load(weights + at, mask=inside, other=0.0))
    return ids, w


@triton.jit
def kept(token, w, key, last):
    """Return w of tokens that the cuts keep, 0 of others."""
    bits = w.to(tl.int32, bitcast=True)
    stays = (bits > key[:, None]) | ((bits == key[:, None]) & (token <= last[:, None]))
    return tl.where(stays, w, 0.0)


@triton.jit
def first_arrival(seed, position, token, w):
    """Return the token of least e_v / w [rows] and that quotient, float64, inf where all w are 0:
    `sglang_dspark.verify.seeded`'s choice at a position."""
    arrival = waits(seed, position, token) / tl.where(w > 0, w, 1.0).to(tl.float64)
    best, at = tl.min(tl.where(w > 0, arrival, float("inf")), 1, return_indices=True)
    here = tl.arange(0, token.shape[1])[None, :] == at[:, None]
    return best, tl.max(tl.where(here, token, 0), 1)


@triton.jit
def waits(seed, position, token):
    """Return e_v [rows, block] float64: -log of MurmurHash3 over the words of seed, position
    [rows] int64 and token [rows, block], as `sglang_dspark.verify.seeded.waits`."""
    state = _mixed(seed.to(tl.uint32) * 0, seed.to(tl.uint32))
    state = _mixed(state, (seed >> 32).to(tl.uint32))
    state = _mixed(state, position.to(tl.uint32))
    state = _mixed(state[:, None], token.to(tl.uint32)) ^ 16
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


@triton.jit
def found(at, active):
    """Load what another program of the same launch may have written."""
    return tl.load(at, mask=active, other=0.0, cache_modifier=".cg")
