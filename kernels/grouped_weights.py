"""Multiply a tile of weights in any format by a tile of rows: one step of a grouped GEMM.

Weights come first in the product, so that the accumulator is [columns, rows]: tensor instructions
require 64 of the first and as few as 16 of the second, which is what decoding has.

FP4 codes (E2M1) become numbers by integer operations; code x E8M0 or E4M3 scale has at most six
significant bits, so it is exact in BF16, as FP8 codes are. A byte holds two neighbours of a row of
K; instead of interleaving them, the even columns of the rows meet the low halves and the odd
columns the high ones. NVFP4's scale of a matrix waits for the end.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e2m1(code):
    """Codes 0..15 (int32) -> float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    size = code & 7
    bits = tl.where(size < 2, size * 0x3F000000, (size << 22) + 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def e8m0(code):
    """Codes (uint8) -> float32 powers of two 2^(code - 127); 255 -> NaN."""
    bits = code.to(tl.int32)
    special = tl.where(bits == 0, 0x00400000, 0x7FC00000)
    return tl.where((bits > 0) & (bits < 255), bits << 23, special).to(tl.float32, bitcast=True)


@triton.jit
def load_rows(
    x,
    rows,
    row_ok,
    step,
    k,
    form: tl.constexpr,
    upcast: tl.constexpr,
    block_k: tl.constexpr,
):
    """Columns step.. of some rows of x [*, K], transposed: all [block_k, rows] twice, or for FP4
    the even and the odd ones [block_k / 2, rows]. FP8 rows stay FP8, but BF16 beside FP4."""
    inner = step + tl.arange(0, block_k)
    tile = tl.load(
        x + rows[:, None] * k + inner[None, :],
        mask=row_ok[:, None] & (inner < k)[None, :],
        other=0.0,
    )
    if upcast:
        tile = tile.to(tl.float32)
    if form == "mxfp4" or form == "nvfp4":
        if not upcast:
            tile = tile.to(tl.bfloat16)
        even, odd = tl.split(tl.reshape(tile, (rows.shape[0], block_k // 2, 2)))
    else:
        even, odd = tile, tile
    return tl.trans(even), tl.trans(odd)


@triton.jit
def load_scales(x_scale, rows, row_ok, step, k, x_scaled: tl.constexpr):
    """Scales [rows] of the columns step.. of FP8 rows; zeros, not to be used, where there are
    none."""
    if x_scaled:
        place = rows * ((k + 127) // 128) + step // 128
        scales = tl.load(x_scale + place, mask=row_ok, other=0.0)
    else:
        scales = tl.zeros(rows.shape, tl.float32)
    return scales


@triton.jit
def add_product(
    acc,  # [columns, rows] float32
    even,  # [block_k or block_k / 2, rows], as `load_rows` gives them
    odd,
    own,  # [rows] float32, scales of the rows
    w,  # weights, any format
    w_scale,
    expert,
    columns,
    column_ok,
    step,
    n,
    k,
    form: tl.constexpr,
    x_scaled: tl.constexpr,
    block_k: tl.constexpr,
):
    """acc + W[columns, step..] X[rows, step..]^T."""
    if form == "mxfp4" or form == "nvfp4":
        low, high = _fp4(w, w_scale, expert, columns, column_ok, step, n, k, form, block_k)
        low, high = low.to(even.dtype), high.to(even.dtype)
        if x_scaled:
            part = tl.dot(low, even, input_precision="ieee")
            part = tl.dot(high, odd, part, input_precision="ieee")
            acc += part * own[None, :]
        else:
            acc = tl.dot(low, even, acc, input_precision="ieee")
            acc = tl.dot(high, odd, acc, input_precision="ieee")
    else:
        tile = _whole(w, expert, columns, column_ok, step, n, k, block_k).to(even.dtype)
        if form == "fp8":
            scale = _block_scales(w_scale, expert, columns, column_ok, step, n, k)
            part = tl.dot(tile, even, input_precision="ieee") * scale[:, None]
            if x_scaled:
                part = part * own[None, :]
            acc += part
        else:
            acc = tl.dot(tile, even, acc, input_precision="ieee")
    return acc


@triton.jit
def _block_scales(w_scale, expert, columns, column_ok, step, n, k):
    """Scales [columns] of the blocks of 128 x 128 that the columns step.. lie in."""
    deep = (k + 127) // 128
    place = (expert * ((n + 127) // 128) + columns // 128) * deep + step // 128
    return tl.load(w_scale + place, mask=column_ok, other=0.0)


@triton.jit
def _whole(w, expert, columns, column_ok, step, n, k, block_k: tl.constexpr):
    """Weights of the columns step.., [columns, block_k], one to a place; E4M3 is exact in BF16."""
    inner = step + tl.arange(0, block_k)
    return tl.load(
        w + (expert * n + columns[:, None]) * k + inner[None, :],
        mask=column_ok[:, None] & (inner < k)[None, :],
        other=0.0,
    )


@triton.jit
def _fp4(
    w,
    w_scale,
    expert,
    columns,
    column_ok,
    step,
    n,
    k,
    form: tl.constexpr,
    block_k: tl.constexpr,
):
    """Scaled weights of the even and of the odd columns step.., [columns, block_k / 2] float32."""
    group: tl.constexpr = 32 if form == "mxfp4" else 16
    half: tl.constexpr = block_k // 2
    line = expert * n + columns
    inner = step // 2 + tl.arange(0, half)
    packed = tl.load(
        w + line[:, None] * (k // 2) + inner[None, :],
        mask=column_ok[:, None] & (inner < k // 2)[None, :],
        other=0,
    ).to(tl.int32)
    at = step // group + tl.arange(0, block_k // group)
    scale = tl.load(
        w_scale + line[:, None] * (k // group) + at[None, :],
        mask=column_ok[:, None] & (at < k // group)[None, :],
    )  # of columns that are not there anything may be the scale: their codes are zero
    scale = e8m0(scale) if form == "mxfp4" else scale.to(tl.float32)
    scale = tl.where(column_ok[:, None] & (at < k // group)[None, :], scale, 0.0)
    shape: tl.constexpr = (columns.shape[0], block_k // group, group // 2)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], shape), (columns.shape[0], half))
    return e2m1(packed & 15) * scale, e2m1(packed >> 4) * scale
