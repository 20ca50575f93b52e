"""Compute every decoder layer of a pass in one call of compiled code.

The arithmetic of `LlamaDecoderLayer.forward` (sglang/srt/models/llama.py) and
`DFlashDecoderLayer.forward` (models/dflash.py), which differ in the norms of query and key heads:
the products of linear.py, called by their address, between the row kernels of fused_ops.py and
paged_attention.py. Layers are rows of tables (`Tables`, made by layer_stack.py), as thirty layers
times nine calls from Python cost as much as the arithmetic between the products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray
from numpy.typing import NDArray

from sglang_dspark.backends.cpu.fused_ops import (
    add_rms_norm_rows,
    rms_norm_heads,
    rms_norm_rows,
    rotate_rows,
    silu_and_mul_rows,
)
from sglang_dspark.backends.cpu.jit import floats_at, kernel, multiply_at
from sglang_dspark.backends.cpu.paged_attention import attend

# Columns of Tables.addresses. A norm's address is 0 where the model has none: those of the heads,
# and of layer 0's input.
QKV, OUT, GATE_UP, DOWN = 0, 1, 2, 3
FIRST, SECOND, QUERY, KEY = 4, 5, 6, 7
COS_SIN, KEYS, VALUES = 8, 9, 10
ADDRESSES = 11
# Columns of Tables.numbers: threads of each product, then these.
CAUSAL, WINDOW, POSITIONS, ROTARY = 4, 5, 6, 7
NUMBERS = 8
# Columns of Tables.fractions: epsilon of each norm (first, second, query, key), then this.
SCALE = 4
FRACTIONS = 5


class Tables(NamedTuple):
    """L layers of one shape. addresses [L, ADDRESSES] int64, numbers [L, NUMBERS] int64, fractions
    [L, FRACTIONS] float64; sizes: d, H, Hkv, D, f and the cache's slots; entry: address of the
    matrix kernel; ending: of the weight of the norm behind the last layer, 0 for none."""

    addresses: NDArray[np.int64]
    numbers: NDArray[np.int64]
    fractions: NDArray[np.float64]
    sizes: tuple[int, int, int, int, int, int]
    entry: int
    ending: int


class Buffers(NamedTuple):
    """Buffers of n rows between the kernels of a layer; one layer runs at a time.

    All are C-contiguous, so that one compilation serves every n. heads is qkv by head: queries,
    keys, values. mixed is what a layer adds to carried, entered the sum of both before it.
    """

    normed: Any  # [n, d]
    qkv: Any  # [n, (H + 2 Hkv) D]
    heads: Any  # [n, H + 2 Hkv, D]
    attended: Any  # [n, H, D]
    gate_up: Any  # [n, 2 f]
    activated: Any  # [n, f]
    mixed: Any  # [n, d]
    carried: Any  # [n, d]
    entered: Any  # [n, d]


class Pass(NamedTuple):
    """Rows and requests: positions, slots [n] int64; table, requests, trees of AttentionPlan."""

    positions: Any
    slots: Any
    table: Any
    requests: Any
    trees: Any


@kernel
def _multiply(tables, layer, which, source, block, n, k, target):  # type: ignore[no-untyped-def]
    """target [rows, n] = source [rows, k] times the layer's weight number `which`."""
    multiply_at(
        tables.entry, source.ctypes.data, k, source.shape[0], block,
        tables.addresses[layer, which], n, k, target.ctypes.data, tables.numbers[layer, which],
    )  # fmt: skip


@kernel
def _norm_weight(tables, layer, which, width):  # type: ignore[no-untyped-def]
    return carray(floats_at(tables.addresses[layer, which]), (width,))


@kernel
def _enter(tables, room, now, layer, block, hidden):  # type: ignore[no-untyped-def]
    """Compute up to the attention: room.entered, rotated queries and keys, values."""
    d, heads, kv_heads, width, _, _ = tables.sizes
    fractions, numbers = tables.fractions[layer], tables.numbers[layer]
    weight = _norm_weight(tables, layer, FIRST, d)
    if layer == 0:
        room.entered[:] = hidden
        if tables.addresses[layer, FIRST] != 0:
            rms_norm_rows(room.entered, weight, fractions[0], room.normed)
        else:
            room.normed[:] = hidden
    else:
        add_rms_norm_rows(room.mixed, room.carried, weight, fractions[0], room.entered, room.normed)
    _multiply(tables, layer, QKV, room.normed, block, (heads + 2 * kv_heads) * width, d, room.qkv)
    if tables.addresses[layer, QUERY] != 0:
        query = _norm_weight(tables, layer, QUERY, width)
        rms_norm_heads(room.qkv, 0, heads, query, fractions[2])
        key = _norm_weight(tables, layer, KEY, width)
        rms_norm_heads(room.qkv, heads, kv_heads, key, fractions[3])
    shape = (numbers[POSITIONS], numbers[ROTARY])
    cos_sin = carray(floats_at(tables.addresses[layer, COS_SIN]), shape)
    end = heads * width
    rotate_rows(
        now.positions, cos_sin, room.qkv[:, :end], room.qkv[:, end : end + kv_heads * width], width
    )


@kernel
def _cache(tables, layer, which):  # type: ignore[no-untyped-def]
    _, _, kv_heads, width, _, slots = tables.sizes
    return carray(floats_at(tables.addresses[layer, which]), (slots, kv_heads, width))


@kernel
def _heads(tables, room):  # type: ignore[no-untyped-def]
    """View queries [n, H, D], keys and values [n, Hkv, D]."""
    _, heads, kv_heads, _, _, _ = tables.sizes
    end = heads + kv_heads
    return room.heads[:, :heads], room.heads[:, heads:end], room.heads[:, end:]


@kernel
def _leave(tables, room, layer, block):  # type: ignore[no-untyped-def]
    """Compute from the attention on: room.mixed and room.carried."""
    d, heads, _, width, mlp, _ = tables.sizes
    attended = room.attended.reshape(room.attended.shape[0], heads * width)
    _multiply(tables, layer, OUT, attended, block, d, heads * width, room.mixed)
    weight = _norm_weight(tables, layer, SECOND, d)
    add_rms_norm_rows(
        room.mixed, room.entered, weight, tables.fractions[layer, 1], room.carried, room.normed
    )
    _multiply(tables, layer, GATE_UP, room.normed, block, 2 * mlp, d, room.gate_up)
    silu_and_mul_rows(room.gate_up, room.activated)
    _multiply(tables, layer, DOWN, room.activated, block, d, mlp, room.mixed)


@kernel
def _finish(tables, room, epsilon, normed):  # type: ignore[no-untyped-def]
    """Norm the last output with all additions; without a norm copy it."""
    if tables.ending == 0:
        normed[:] = room.mixed + room.carried
        return
    weight = carray(floats_at(tables.ending), (tables.sizes[0],))
    add_rms_norm_rows(room.mixed, room.carried, weight, epsilon, room.entered, normed)


@kernel
def layers(  # type: ignore[no-untyped-def]
    tables, sharing, room, now, block, hidden, wanted, captured, epsilon, normed
):
    """Run all layers: (Tables, `threads.sharing`, Buffers, Pass, block, hidden [n, d], wanted [L],
    captured [C, n, d], epsilon, normed [n, d]).

    block: rows computed together in products. wanted[l]: place in `captured` of layer l's input,
    with all additions, -1 for none. epsilon: of the last norm, whose output is `normed`.
    """
    for layer in range(tables.addresses.shape[0]):
        _enter(tables, room, now, layer, block, hidden)
        if wanted[layer] >= 0:
            captured[wanted[layer]] = room.entered
        query, key, value = _heads(tables, room)
        attend(
            sharing, query, _cache(tables, layer, KEYS), _cache(tables, layer, VALUES), key, value,
            now.slots, now.table, now.requests, now.trees,
            np.float32(tables.fractions[layer, SCALE]), tables.numbers[layer, CAUSAL] != 0,
            tables.numbers[layer, WINDOW], room.attended,
        )  # fmt: skip
        _leave(tables, room, layer, block)
    _finish(tables, room, epsilon, normed)
