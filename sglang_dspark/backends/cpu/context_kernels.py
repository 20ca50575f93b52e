"""Write context rows into the draft's K/V cache, and defer rows by cache slot (Numba).

While nothing is drafted the draft's cache is not read, and most of what decoding and prefills would
write to it is never read: its requests end before the next draft. A deferred row is at place
`slot % places`. So a row of the slot's next generation replaces that of the last one, which no
request can see any more, and rows of slots that the prefix cache hands on are still there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray
from numpy.typing import NDArray

from sglang_dspark.backends.cpu.fused_ops import rms_norm_heads, rms_norm_rows, rotate_rows
from sglang_dspark.backends.cpu.jit import floats_at, kernel, multiply_at
from sglang_dspark.backends.cpu.linear import MAX_BLOCK_ROWS

_Index = NDArray[np.int64]


class WaitingRows(NamedTuple):
    """features [places, m*d] of the tokens at positions [places], for the cache slots in slots.

    waits [places]: whether a row waits there; the previous content stays readable until the next
    `keep`. number [1]: rows that wait.
    """

    features: NDArray[np.float32]
    positions: _Index
    slots: _Index
    waits: NDArray[np.bool_]
    number: _Index


def waiting_rows(places: int, width: int) -> WaitingRows:
    """Allocate without any row; the system maps memory as places are used."""
    return WaitingRows(
        np.empty((places, width), np.float32),
        np.empty(places, np.int64),
        np.empty(places, np.int64),
        np.zeros(places, np.bool_),
        np.zeros(1, np.int64),
    )


@kernel
def keep(waiting, hidden, chosen, start, positions, slots):  # type: ignore[no-untyped-def]
    """Copy rows hidden[chosen[start:]] to their places, up to one that another slot's row occupies.

    Returns how many of `chosen` are done.
    """
    places = waiting.slots.shape[0]
    for j in range(start, chosen.shape[0]):
        i = chosen[j]
        place = slots[i] % places
        if not waiting.waits[place]:
            waiting.waits[place] = True
            waiting.number[0] += 1
        elif waiting.slots[place] != slots[i]:
            return j
        waiting.features[place] = hidden[i]
        waiting.positions[place] = positions[i]
        waiting.slots[place] = slots[i]
    return chosen.shape[0]


@kernel
def take_context(waiting, table, rows, lens):  # type: ignore[no-untyped-def]
    """Take places of rows that wait for slots table[rows[r], :lens[r]] of requests r, [n] int64.

    table: [rows, context] int32. The rows do not wait any more.
    """
    places = waiting.slots.shape[0]
    found = np.empty(waiting.number[0], np.int64)
    count = 0
    for r in range(rows.shape[0]):
        for position in range(lens[r]):
            slot = np.int64(table[rows[r], position])
            place = slot % places
            if waiting.waits[place] and waiting.slots[place] == slot:
                waiting.waits[place] = False
                found[count] = place
                count += 1
    waiting.number[0] -= count
    return found[:count]


@kernel
def take_from(waiting, first, most):  # type: ignore[no-untyped-def]
    """Take up to `most` places of waiting rows, from place `first` on and round, [n] int64."""
    places = waiting.slots.shape[0]
    found = np.empty(min(most, waiting.number[0]), np.int64)
    count, place = 0, first
    while count < found.shape[0]:
        if waiting.waits[place]:
            waiting.waits[place] = False
            found[count] = place
            count += 1
        place = (place + 1) % places
    waiting.number[0] -= count
    return found


@kernel
def forget(waiting, chosen, slots):  # type: ignore[no-untyped-def]
    """Drop rows that wait for slots[chosen]: newer ones replace them."""
    places = waiting.slots.shape[0]
    if waiting.number[0] == 0:
        return
    for i in chosen:
        place = slots[i] % places
        if waiting.waits[place] and waiting.slots[place] == slots[i]:
            waiting.waits[place] = False
            waiting.number[0] -= 1


class ContextTables(NamedTuple):
    """Addresses and sizes for the kernel. L layers, Hkv heads of D, d hidden, m*d features.

    entries, weights, threads: the matrix kernels, addresses and threads of the products with fc
    [d, m*d] and stacked [L * 2 * Hkv * D, d]. fc_norm [d], head_norms [L, D], cos_sin [positions,
    rotary]. caches [L, 2]: addresses of each layer's keys and values [slots, Hkv, D]. sizes: m*d,
    d, Hkv, D, slots.
    """

    entries: tuple[int, int]
    weights: tuple[int, int]
    threads: tuple[int, int]
    fc_norm: NDArray[np.float32]
    head_norms: NDArray[np.float32]
    epsilons: tuple[float, float]
    cos_sin: NDArray[np.float32]
    caches: NDArray[np.int64]
    sizes: tuple[int, int, int, int, int]


@kernel
def _multiply(tables, which, x, out):  # type: ignore[no-untyped-def]
    blocks = (x.shape[0] + MAX_BLOCK_ROWS - 1) // MAX_BLOCK_ROWS
    together = (x.shape[0] + blocks - 1) // blocks
    multiply_at(
        tables.entries[which], x.ctypes.data, x.shape[1], x.shape[0], together,
        tables.weights[which], out.shape[1], x.shape[1], out.ctypes.data, tables.threads[which],
    )  # fmt: skip


@kernel
def _write_layer(tables, layer, stacked, positions, slots):  # type: ignore[no-untyped-def]
    """Write a layer's keys, normed and rotated, and values into its cache.

    stacked: rows [n, L * 2 * Hkv * D], whose keys are overwritten; positions, slots [n]."""
    _, _, heads, width, places = tables.sizes
    first = layer * 2 * heads
    middle, end = (first + heads) * width, (first + 2 * heads) * width
    new = stacked[:, first * width : middle]
    rms_norm_heads(stacked, first, heads, tables.head_norms[layer], tables.epsilons[1])
    rotate_rows(positions, tables.cos_sin, new, new[:, :0], width)
    keys = carray(floats_at(tables.caches[layer, 0]), (places, heads * width))
    values = carray(floats_at(tables.caches[layer, 1]), (places, heads * width))
    for i in range(slots.shape[0]):
        keys[slots[i]] = new[i]
        values[slots[i]] = stacked[i, middle:end]


@kernel
def committed_rows(lens, width, total):  # type: ignore[no-untyped-def]
    """List the first lens[r] rows of each window of `width`; all rows if lens is empty."""
    if lens.shape[0] == 0:
        return np.arange(total)
    found = np.empty(lens.sum(), np.int64)
    at = 0
    for r in range(lens.shape[0]):
        for k in range(lens[r]):
            found[at] = r * width + k
            at += 1
    return found


@kernel
def inject(tables, hidden, projected, chosen, positions, slots):  # type: ignore[no-untyped-def]
    """Project and write rows `chosen` [n] of hidden [., m*d], or [., d] if projected."""
    features, d, heads, size, _ = tables.sizes
    taken = chosen.shape[0]
    rows = np.empty((taken, d if projected else features), np.float32)
    for i in range(taken):
        rows[i] = hidden[chosen[i]]
    context = rows
    if not projected:
        context = np.empty((taken, d), np.float32)
        raw = np.empty((taken, d), np.float32)
        _multiply(tables, 0, rows, raw)
        rms_norm_rows(raw, tables.fc_norm, tables.epsilons[0], context)
    layers = tables.caches.shape[0]
    stacked = np.empty((taken, layers * 2 * heads * size), np.float32)
    _multiply(tables, 1, context, stacked)
    for layer in range(layers):
        _write_layer(tables, layer, stacked, positions[chosen], slots[chosen])
