"""Multiply each token's row by the weights of its expert, Y[i] = X[i] W[e(i)]^T (M-grouped GEMM).

One launch over ragged groups.

The layout is the one that DeepGEMM calls contiguous: rows sorted by expert, end to end, but without
its alignment of the groups. The rows may also be anywhere and be gathered.

Scheduling is persistent: as many programs as the device holds, each of which reads the group sizes,
cuts the groups into the same tiles, and computes every P-th tile. The host reads no size and
no launch precedes this one, so it neither synchronises nor depends on the routing, and can
be captured in a graph. One program makes one output tile and sums over K in order: no atomics, and
bitwise the same result in every run.

Formats are those of `GroupedOperands`. Partial sums of 128 columns of FP8 are scaled and added in
float32, which also bounds the error of FP8 tensor cores' short accumulators. Optional epilogues:
SwiGLU of the two halves of the weights' rows; quantisation to FP8 with one scale per
1 x 128 (as in `fp8_rows`); each row times its routing weight, to the place of its (token,
choice) pair, after which `routing.sum_pairs` adds the choices of a token in order.

The reference is `kernels/grouped_reference.py`: compared with it on an H200, not timed there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.grouped_config import Tiling, tiling
from sglang_dspark.kernels.grouped_layout import (
    FP4_GROUPS,
    FP8,
    SCALE_BLOCK,
    GroupedOperands,
    check_routed,
    weight_format,
)
from sglang_dspark.kernels.grouped_schedule import (
    bounds,
    group_of_tile,
    tile_place,
    tiles_of_groups,
)
from sglang_dspark.kernels.grouped_weights import add_product, load_rows, load_scales
from sglang_dspark.kernels.rounding import fp8_quotients, narrowed
from sglang_dspark.kernels.routing import sum_pairs


class Activations(NamedTuple):
    """Rows in BF16 or float32 without scales, or in FP8 with scales [..., ceil(width/128)]."""

    x: Tensor
    x_scale: Tensor | None = None


def m_grouped_gemm_nt_contiguous(operands: GroupedOperands) -> Tensor:
    """Compute Y [M, N] in `operands.out_dtype`; rows after the last group are exactly zero.

    Raises ValueError where shapes, dtypes or scales do not fit each other; on the CPU, where reads
    cost no synchronisation, also for group offsets out of order and NaN or infinite weights.
    """
    operands.check()
    shape = (operands.rows, operands.weight.shape[1])
    out = torch.empty(shape, dtype=operands.out_dtype, device=operands.x.device)
    return _launch(operands, out)


def m_grouped_swiglu_nt_contiguous(operands: GroupedOperands, fp8: bool = False) -> Activations:
    """Compute silu(X G^T) * (X U^T) [M, N/2]; the weights' rows are those of G, then those of U.

    In `operands.out_dtype`, or with fp8 in FP8 with float32 scales [M, ceil(N/2/128)]; padding rows
    are exactly zero, their scale is one. Raises ValueError as the product does, and for odd N.
    """
    operands.check()
    columns, odd = divmod(operands.weight.shape[1], 2)
    if odd:
        raise ValueError(f"grouped GEMM: {2 * columns + 1} rows of gate and up together are odd")
    dtype, device = FP8 if fp8 else operands.out_dtype, operands.x.device
    out = torch.empty(operands.rows, columns, dtype=dtype, device=device)
    scale = None
    if fp8:
        groups = triton.cdiv(columns, SCALE_BLOCK)
        scale = torch.empty(operands.rows, groups, dtype=torch.float32, device=device)
    return Activations(_launch(operands, out, swiglu=True, out_scale=scale), scale)


def m_grouped_scatter_nt_contiguous(
    operands: GroupedOperands, pairs: Tensor, weights: Tensor
) -> Tensor:
    """Compute [T, N]: row i times weights.flatten()[pairs[i]], summed by token, choices in order.

    pairs: [M] int32, a permutation of the T * top_k pairs (token * top_k + choice), as
    `routing.route` returns it; rows after the last group count as zero. weights: [T, top_k]
    float32. Products are rounded to `operands.out_dtype`, sums are float32. ValueError as above.
    """
    if operands.pairs is not None:
        raise ValueError("grouped GEMM: rows are gathered by the first product, not by the second")
    operands.check()
    check_routed(pairs, weights, operands.rows)
    shape = (*weights.shape, operands.weight.shape[1])
    out = torch.empty(shape, dtype=operands.out_dtype, device=operands.x.device)
    return sum_pairs(_launch(operands, out, pairs=pairs, weights=weights))


def _launch(
    operands: GroupedOperands,
    out: Tensor,
    swiglu: bool = False,
    out_scale: Tensor | None = None,
    pairs: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    x, n, rows = operands.x, operands.weight.shape[1], operands.rows
    if not rows or not n:
        return out
    experts, form, fp8_out = len(operands.weight), weight_format(operands), out_scale is not None
    how = tiling(rows // experts, form, x.dtype == FP8, swiglu, fp8_out)
    columns = n // 2 if swiglu else n
    tiles = (rows // how.block_m + experts + 1) * triton.cdiv(columns, how.block_n)
    gather = operands.pairs
    weight, *widths = _weight_rows(operands, form)
    sizes = (rows, experts, n, x.shape[-1], *widths)
    scales = (operands.x_scale, operands.weight_scale, operands.weight_global, out_scale)
    _grouped_kernel[(min(tiles, _programs(x.device, how)),)](
        x,
        weight,
        out,
        *(x if part is None else part for part in (*scales, gather, pairs, weights)),
        operands.offsets,
        *sizes,
        top_k=0 if gather is None else operands.top_k,
        scatter=pairs is not None,
        swiglu=swiglu,
        fp8_out=fp8_out,
        form=form,
        x_scaled=operands.x_scale is not None,
        joined=form in FP4_GROUPS and _joins(x.device),
        # The interpreter multiplies the bit patterns of BF16; their products are exact in float32.
        upcast=not x.is_cuda,
        groups_block=triton.next_power_of_2(experts + 1),
        **how.as_options(),
    )
    return out


def _weight_rows(operands: GroupedOperands, form: str) -> tuple[Tensor, int, int]:
    """Return weights, FP4 codes four to an int16, and elements of a row of them and of scales."""
    weight, scale = operands.weight, operands.weight_scale
    if form not in FP4_GROUPS or scale is None:
        return weight, weight.shape[-1], 1
    weight = weight.view(torch.int16)
    return weight, weight.shape[-1], scale.shape[-1]


def _programs(device: torch.device, how: Tiling) -> int:
    """Choose the number of programs that share the tiles."""
    return 3 if device.type == "cpu" else _processors(device) * how.programs


@lru_cache
def _joins(device: torch.device) -> bool:
    """Return whether FP4 weights are joined before one product: on Blackwell."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _grouped_kernel(
    x,  # [M, K], or [T, K] to gather from
    w,  # [E, N, K], or FP4 codes as int16 [E, N, K / 4]
    out,  # [M, N], N / 2 with swiglu, [T, top_k, N] with scatter
    x_scale,  # [M, ceil(K / 128)]
    w_scale,
    w_global,  # [E]
    out_scale,  # [M, ceil(N / 2 / 128)]
    gather,  # [M] int32
    pairs,  # [M] int32
    weights,  # [T, top_k]
    offsets,  # [E + 1]
    size,  # M
    experts, n, k, w_width, scale_width,  # the last two: of a row of w, of FP4's w_scale
    top_k: tl.constexpr,  # 0: no gathering
    scatter: tl.constexpr, swiglu: tl.constexpr, fp8_out: tl.constexpr,
    form: tl.constexpr, x_scaled: tl.constexpr, joined: tl.constexpr, upcast: tl.constexpr,
    groups_block: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    row_tiles: tl.constexpr,
):  # fmt: skip
    last, needed, total = tiles_of_groups(offsets, size, experts, groups_block, block_m)
    width = n // 2 if swiglu else n
    column_tiles = (width + block_n - 1) // block_n
    for tile in range(tl.program_id(0), total * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_place(tile, total, column_tiles, row_tiles)
        group, before = group_of_tile(row_tile, last, needed)
        rows, row_ok, within, source, depth = _tile_rows(
            offsets, gather, group, row_tile - before, size, experts, k, top_k, block_m
        )
        expert = tl.minimum(group, experts - 1).to(tl.int64)  # the padding is group E
        columns = column_tile * block_n + tl.arange(0, block_n)
        acc = _tile_product(
            x, x_scale, source, row_ok, w, w_scale, w_global, expert, columns, width, depth, n, k,
            w_width, scale_width, swiglu, form, x_scaled, joined, upcast, block_m, block_n, block_k,
        )  # fmt: skip
        _store_tile(
            acc, out, out_scale, pairs, weights, rows, row_ok, within, columns, column_tile, width,
            scatter, fp8_out, upcast,
        )  # fmt: skip


@triton.jit
def _tile_rows(
    offsets, gather, group, tile, size, experts, k, top_k: tl.constexpr, block_m: tl.constexpr,
):  # fmt: skip
    """Return rows [block_m] of a group's tile, which exist, which lie within the group's
    bounds, the rows of x that they are made of; and K, or 0 if no row exists."""
    start, end, edge = bounds(offsets, group, size, experts)
    start += tile * block_m
    rows = start.to(tl.int64) + tl.arange(0, block_m)
    row_ok = rows < end
    source = rows
    if top_k > 0:
        source = (tl.load(gather + rows, mask=row_ok, other=0) // top_k).to(tl.int64)
    return rows, row_ok, rows < edge, source, tl.where(start < end, k, 0)


@triton.jit
def _tile_product(
    x,
    x_scale,
    rows,  # of x, [block_m] int64
    row_ok,
    w,
    w_scale,
    w_global,
    expert,
    columns,  # of the output, [block_n]
    width,  # columns of the output
    depth,  # K, or 0 for an empty sum
    n, k, w_width, scale_width,
    swiglu: tl.constexpr, form: tl.constexpr, x_scaled: tl.constexpr, joined: tl.constexpr,
    upcast: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Compute W[columns] X[rows]^T of an expert, [block_n, block_m] float32, or its SwiGLU."""
    acc = tl.zeros((block_n, block_m), tl.float32)
    up = acc
    column_ok = columns < width
    for step in range(0, depth, block_k):
        parts = load_rows(x, rows, row_ok, step, k, form, joined, upcast, block_k)
        own = load_scales(x_scale, rows, row_ok, step, k, x_scaled)
        acc = add_product(
            acc, parts, own, w, w_scale, expert, columns, column_ok, step, n,
            w_width, scale_width, form, x_scaled, joined, upcast, block_k,
        )  # fmt: skip
        if swiglu:
            up = add_product(
                up, parts, own, w, w_scale, expert, columns + width, column_ok, step, n,
                w_width, scale_width, form, x_scaled, joined, upcast, block_k,
            )  # fmt: skip
    return _finished(acc, up, w_global, expert, swiglu, form)


@triton.jit
def _finished(acc, up, w_global, expert, swiglu: tl.constexpr, form: tl.constexpr):
    """Apply the epilogue of the sums: NVFP4's scale of a matrix, SwiGLU."""
    if form == "nvfp4":
        overall = tl.load(w_global + expert)
        acc, up = acc * overall, up * overall
    if swiglu:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    return acc


@triton.jit
def _store_tile(
    acc,  # [block_n, block_m]
    out,
    out_scale,
    pairs,
    weights,
    rows,
    row_ok,
    keep,  # rows to be written: those that are not `row_ok` become zero
    columns,
    column_tile,
    width,
    scatter: tl.constexpr,
    fp8_out: tl.constexpr,
    upcast: tl.constexpr,
):
    """Store a finished tile: in place, or with scatter weighted to the places of its pairs."""
    target = rows
    if scatter:
        target = tl.load(pairs + rows, mask=keep, other=0).to(tl.int64)
        acc = acc * tl.load(weights + target, mask=keep, other=0.0)[None, :]
    acc = tl.where(row_ok[None, :], acc, 0.0)
    if fp8_out:
        acc, scale = fp8_quotients(acc)
        tl.store(out_scale + rows * ((width + 127) // 128) + column_tile, scale, mask=keep)
    tl.store(
        out + target[None, :] * width + columns[:, None],
        narrowed(acc, out.dtype.element_ty, upcast),
        mask=keep[None, :] & (columns < width)[:, None],
    )
