"""Multiply a tile of weights in any format by a tile of rows: one step of a grouped GEMM.

Weights are first in the product, so that the accumulator is [columns, rows]: tensor instructions
require 64 of the first and as few as 16 of the second, and decoding has few rows.

FP4 weights are read four codes (16 bits) at a time: code j of all fours is multiplied with columns
j, j + 4, ... of the rows, without interleaving. On Blackwell, for whose tensor memory Triton
compiles four chained products wrongly, the four tiles are joined before one product.

Two fours are converted at once, as packed BF16: the sign moves to bit 15 of each half and the
magnitude to bits 8..6, which is the code's value times 2^-126. (0.5 is a subnormal number, which
BF16 products keep.) One multiplication by 2^126 and one by the scale follow; a single one by their
product would overflow where the scale is above 2. Code x E8M0 or E4M3 scale has at most six
significant bits, so it is exact in BF16, as FP8 codes are. NVFP4's scale of a matrix is applied at
the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Registers $0..$3: code j of two fours, times its scale, as packed BF16; $4: the fours; $5: their
# scales. The integer products copy a code to the places of its sign and of its magnitude, 6 bits
# apart. `fma` and not `mul`, which needs sm_90; adding -0 keeps the sign of a zero.
_CODES_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 wide, none, a, b, c, d;
    mov.b32 wide, 0x7E807E80;
    mov.b32 none, 0x80008000;
    and.b32 a, $4, 0x000F000F;
    mul.lo.u32 a, a, 0x1040;
    and.b32 a, a, 0x81C081C0;
    and.b32 b, $4, 0x00F000F0;
    mul.lo.u32 b, b, 0x104;
    and.b32 b, b, 0x81C081C0;
    shr.b32 d, $4, 8;
    and.b32 c, d, 0x000F000F;
    mul.lo.u32 c, c, 0x1040;
    and.b32 c, c, 0x81C081C0;
    and.b32 d, d, 0x00F000F0;
    mul.lo.u32 d, d, 0x104;
    and.b32 d, d, 0x81C081C0;
    fma.rn.bf16x2 a, a, wide, none;
    fma.rn.bf16x2 b, b, wide, none;
    fma.rn.bf16x2 c, c, wide, none;
    fma.rn.bf16x2 d, d, wide, none;
    fma.rn.bf16x2 $0, a, $5, none;
    fma.rn.bf16x2 $1, b, $5, none;
    fma.rn.bf16x2 $2, c, $5, none;
    fma.rn.bf16x2 $3, d, $5, none;
    }"""
)


@triton.jit
def scaled_codes(fours, scale, upcast: tl.constexpr):
    """Multiply the codes 0, 1, 2 and 3 of fours (int16) with their scales, four tiles.

    Scales and values are BF16; with upcast float32, made of the same bits, for the interpreter,
    which runs no assembly.
    """
    if upcast:
        bits = fours.to(tl.int32)
        a = _code_value(bits << 12, bits << 6) * scale
        b = _code_value(bits << 8, bits << 2) * scale
        c = _code_value(bits << 4, bits >> 2) * scale
        d = _code_value(bits, bits >> 6) * scale
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _CODES_TO_BF16,
            "=&r,=&r,=&r,=&r,r,r",
            [fours, scale],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


@triton.jit
def _code_value(sign, size):
    """Return float32 of codes with their sign in bit 15 of one int32 and their magnitude in bits
    8..6 of another: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    bits = ((sign & 0x8000) | (size & 0x01C0)) << 16
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


# Four E8M0 codes in $2 -> packed BF16 in $0 and $1: the code is the exponent, but 0 is 2^-127 and
# 255 is NaN, made of infinity times zero.
_E8M0_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 low, high, least, zero;
    mov.b32 least, 0x00400040;
    mov.b32 zero, 0;
    prmt.b32 low, $2, 0, 0x4140;
    prmt.b32 high, $2, 0, 0x4342;
    shl.b32 low, low, 7;
    shl.b32 high, high, 7;
    max.bf16x2 low, low, least;
    max.bf16x2 high, high, least;
    fma.rn.bf16x2 $0, low, zero, low;
    fma.rn.bf16x2 $1, high, zero, high;
    }"""
)


@triton.jit
def e8m0(code, upcast: tl.constexpr):
    """Convert codes (uint8) to 2^(code - 127), 255 to NaN; BF16, or with upcast float32."""
    if upcast:
        bits = code.to(tl.int32)
        special = tl.where(bits == 0, 0x00400000, 0x7FC00000)
        bits = tl.where((bits > 0) & (bits < 255), bits << 23, special)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.inline_asm_elementwise(
            _E8M0_TO_BF16, "=&r,=&r,r", [code], tl.bfloat16, is_pure=True, pack=4
        )
    return scale


@triton.jit
def load_rows(
    x,
    rows,
    row_ok,
    step,
    k,
    form: tl.constexpr,
    joined: tl.constexpr,
    upcast: tl.constexpr,
    block_k: tl.constexpr,
):
    """Load columns step.. of some rows of x [*, K], transposed: [block_k, rows], or for FP4 four
    tiles [block_k / 4, rows] of every fourth column, from 0, 1, 2 and 3, unless joined. FP8 rows
    stay FP8, but become BF16 for FP4 weights."""
    inner = step + tl.arange(0, block_k)
    tile = tl.load(
        x + rows[:, None] * k + inner[None, :],
        mask=row_ok[:, None] & (inner < k)[None, :],
        other=0.0,
    )
    if upcast:
        tile = tile.to(tl.float32)
    fp4: tl.constexpr = form == "mxfp4" or form == "nvfp4"
    if fp4 and not upcast:
        tile = tile.to(tl.bfloat16)
    if fp4 and not joined:
        even, odd = tl.split(tl.reshape(tile, (rows.shape[0], block_k // 4, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d)
    else:
        return (tl.trans(tile),)


@triton.jit
def load_scales(x_scale, rows, row_ok, step, k, x_scaled: tl.constexpr):
    """Load scales [rows] of the columns step.. of FP8 rows; unused zeros if unscaled."""
    if x_scaled:
        place = rows * ((k + 127) // 128) + step // 128
        scales = tl.load(x_scale + place, mask=row_ok, other=0.0)
    else:
        scales = tl.zeros(rows.shape, tl.float32)
    return scales


@triton.jit
def add_product(
    acc,  # [columns, rows] float32
    parts,  # of the rows, as `load_rows` returns them
    own,  # [rows] float32, scales of the rows
    w,  # weights, any format, FP4 as int16
    w_scale,
    expert, columns, column_ok, step, n,
    w_width,  # elements of a row of w
    scale_width,  # and of FP4's w_scale
    form: tl.constexpr, x_scaled: tl.constexpr, joined: tl.constexpr, upcast: tl.constexpr,
    block_k: tl.constexpr,
):  # fmt: skip
    """Return acc + W[columns, step..] X[rows, step..]^T."""
    if form == "mxfp4" or form == "nvfp4":
        tiles = _fp4(
            w, w_scale, expert, columns, column_ok, step, n, w_width, scale_width,
            form, joined, upcast, block_k,
        )  # fmt: skip
        if x_scaled:
            part = tl.dot(tiles[0], parts[0], input_precision="ieee")
            for j in tl.static_range(1, len(tiles)):
                part = tl.dot(tiles[j], parts[j], part, input_precision="ieee")
            acc += part * own[None, :]
        else:
            for j in tl.static_range(len(tiles)):
                acc = tl.dot(tiles[j], parts[j], acc, input_precision="ieee")
    else:
        tile = _whole(w, expert, columns, column_ok, step, n, w_width, block_k).to(parts[0].dtype)
        if form == "fp8":
            scale = _block_scales(w_scale, expert, columns, column_ok, step, n, w_width)
            part = tl.dot(tile, parts[0], input_precision="ieee") * scale[:, None]
            if x_scaled:
                part = part * own[None, :]
            acc += part
        else:
            acc = tl.dot(tile, parts[0], acc, input_precision="ieee")
    return acc


@triton.jit
def _block_scales(w_scale, expert, columns, column_ok, step, n, k):
    """Load scales [columns] of the 128 x 128 blocks that contain the columns step..."""
    deep = (k + 127) // 128
    place = (expert * ((n + 127) // 128) + columns // 128) * deep + step // 128
    return tl.load(w_scale + place, mask=column_ok, other=0.0)


@triton.jit
def _whole(w, expert, columns, column_ok, step, n, k, block_k: tl.constexpr):
    """Load weights of the columns step.., [columns, block_k], one each; E4M3 is exact in BF16."""
    inner = step + tl.arange(0, block_k)
    return tl.load(
        w + (expert * n + columns[:, None]) * k + inner[None, :],
        mask=column_ok[:, None] & (inner < k)[None, :],
        other=0.0,
    )


@triton.jit
def _fp4(
    w, w_scale, expert, columns, column_ok, step, n, w_width, scale_width,
    form: tl.constexpr, joined: tl.constexpr, upcast: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Load scaled weights of every fourth column from step, step + 1, + 2 and + 3, four tiles
    [columns, block_k / 4]; joined, one tile [columns, block_k].

    Widths are arguments, so that Triton knows which are multiples of 16: then 16 bytes of
    codes and all scales of a step are copied at once, ahead of time.
    """
    group: tl.constexpr = 32 if form == "mxfp4" else 16
    line = expert * n + columns
    inner = step // 4 + tl.arange(0, block_k // 4)
    fours = tl.load(
        w + line[:, None] * w_width + inner[None, :],
        mask=column_ok[:, None] & (inner < w_width)[None, :],
        other=0,
    )
    at = step // group + tl.arange(0, block_k // group)
    scale = tl.load(
        w_scale + line[:, None] * scale_width + at[None, :],
        mask=column_ok[:, None] & (at < scale_width)[None, :],
        other=0.0,
    )  # of absent columns too, whose codes are zero: none may be NaN
    if form == "mxfp4":
        scale = e8m0(scale, upcast)
    else:
        scale = scale.to(tl.float32)
        if not upcast:
            scale = scale.to(tl.bfloat16)  # exact
    shape: tl.constexpr = (columns.shape[0], block_k // group, group // 4)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], shape), fours.shape)
    a, b, c, d = scaled_codes(fours, scale, upcast)
    if joined:
        return (tl.interleave(tl.interleave(a, c), tl.interleave(b, d)),)
    else:
        return a, b, c, d
