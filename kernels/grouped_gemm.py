"""M-grouped GEMM: every token's row times the weights of its own expert, Y[i] = X[i] W[e(i)]^T, in
one launch over ragged groups.

Two layouts, named as DeepGEMM names them. Contiguous: rows sorted by expert, end to end, without
DeepGEMM's alignment of the groups. Masked: a fixed number of slots for each expert, of which a
count on the device says how many are in use; its launch has the same shape whatever the counts.
Contiguous groups are cut into tiles on the device and the grid is sized by a bound that needs no
count from it. So neither synchronises, and both can be captured in a graph. One program makes one
output tile and sums over K in order: no atomics, the same bits in every run.

Weights are BF16, or FP8 E4M3 with one float32 scale per 128 x 128 (DeepSeek); activations are BF16,
or FP8 with one float32 scale per 1 x 128 beside FP8 weights. Partial sums of 128 columns are scaled
and added in float32, which also bounds what FP8 tensor cores lose in their short accumulators.
The reference is `kernels/grouped_reference.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.grouped_layout import (
    SCALE_BLOCK,
    GroupedOperands,
    MaskedOperands,
    Tiles,
    contiguous_tiles,
    masked_tiles,
)


def m_grouped_gemm_nt_contiguous(operands: GroupedOperands) -> Tensor:
    """Y [M, N] in `operands.out_dtype`; rows behind the last group are exactly zero.

    Raises ValueError where shapes, dtypes or scales do not fit each other; on the CPU, where values
    can be read for nothing, also for group offsets out of order.
    """
    operands.check()
    rows, experts = operands.x.shape[0], operands.weight.shape[0]
    how = _options(operands, rows // experts)
    return _launch(operands, contiguous_tiles(operands.offsets, rows, how["block_m"]), how)


def m_grouped_gemm_nt_masked(operands: MaskedOperands) -> Tensor:
    """Y [E, C, N] in `operands.out_dtype`; slots that are not in use become exactly zero.

    Raises ValueError where shapes, dtypes or scales do not fit each other; on the CPU also for
    counts beyond the slots.
    """
    operands.check()
    slots = operands.x.shape[1]
    how = _options(operands, slots)
    return _launch(operands, masked_tiles(operands.counts, slots, how["block_m"]), how)


def _options(operands: GroupedOperands | MaskedOperands, group: int) -> dict[str, int]:
    scaled = (part is not None for part in (operands.x_scale, operands.weight_scale))
    return launch_options(group, *scaled)


def _launch(
    operands: GroupedOperands | MaskedOperands, tiles: Tiles, how: dict[str, int]
) -> Tensor:
    (*rows, inner), columns = operands.x.shape, operands.weight.shape[1]
    device = operands.x.device
    out = torch.empty(*rows, columns, dtype=operands.out_dtype, device=device)
    if not out.numel():
        return out
    _grouped_kernel[(len(tiles.expert), triton.cdiv(columns, how["block_n"]))](
        operands.x,
        operands.weight,
        out,
        operands.x if operands.x_scale is None else operands.x_scale,
        operands.x if operands.weight_scale is None else operands.weight_scale,
        *tiles,
        columns,
        inner,
        triton.cdiv(columns, SCALE_BLOCK),
        triton.cdiv(inner, SCALE_BLOCK),
        # The interpreter multiplies the bit patterns of BF16; their products are exact in float32.
        upcast=not operands.x.is_cuda,
        **how,
    )
    return out


def launch_options(group: int, x_scaled: bool, w_scaled: bool) -> dict[str, int]:
    """Tile shape and launch parameters for groups of about so many rows, by keyword of the kernel.

    A tile has as many rows as a group, 16 (decode) to 128 (prefill), and its columns lie within one
    block of weight scales. A step is one group of scales, or 64 columns without scales.
    """
    block_m = min(128, max(16, triton.next_power_of_2(max(group, 1))))
    return {
        "x_scaled": x_scaled,
        "w_scaled": w_scaled,
        "block_m": block_m,
        "block_n": SCALE_BLOCK,
        "block_k": SCALE_BLOCK if w_scaled else 64,
        "num_warps": 8 if block_m == 128 else 4,
        "num_stages": 3,
    }


@triton.jit
def _grouped_kernel(
    x,  # [M, K]
    w,  # [E, N, K]
    out,  # [M, N]
    x_scale,  # [M, ceil(K/128)]
    w_scale,  # [E, ceil(N/128), ceil(K/128)]
    tile_expert,  # the four parts of Tiles
    tile_row,
    ends,
    limits,
    n,
    k,
    n_scales,
    k_scales,
    x_scaled: tl.constexpr,
    w_scaled: tl.constexpr,
    upcast: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    tile = tl.program_id(0)
    column_tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= 0:
        first = tl.load(tile_row + tile)
        end = tl.load(ends + expert)
        rows = first.to(tl.int64) + tl.arange(0, block_m)
        columns = column_tile * block_n + tl.arange(0, block_n)
        row_ok = rows < end
        column_ok = columns < n
        acc = tl.full((block_m, block_n), 0.0, tl.float32)
        if first < end:
            scale_row = w_scale + (expert * n_scales + column_tile) * k_scales
            for step in range(0, k, block_k):
                inner = step + tl.arange(0, block_k)
                inner_ok = inner < k
                a = tl.load(
                    x + rows[:, None] * k + inner[None, :],
                    mask=row_ok[:, None] & inner_ok[None, :],
                    other=0.0,
                )
                b = tl.load(
                    w + (expert * n + columns[None, :]) * k + inner[:, None],
                    mask=inner_ok[:, None] & column_ok[None, :],
                    other=0.0,
                )
                if upcast:
                    a, b = a.to(tl.float32), b.to(tl.float32)
                elif w_scaled and not x_scaled:
                    b = b.to(a.dtype)  # E4M3 is exact in BF16
                part = tl.dot(a, b, input_precision="ieee")
                if w_scaled:
                    part = part * tl.load(scale_row + step // block_k)
                if x_scaled:
                    own = tl.load(x_scale + rows * k_scales + step // block_k, row_ok, other=0.0)
                    part = part * own[:, None]
                acc += part
        tl.store(
            out + rows[:, None] * n + columns[None, :],
            acc.to(out.dtype.element_ty),
            mask=(rows < tl.load(limits + expert))[:, None] & column_ok[None, :],
        )
