"""Activations to FP8 E4M3 with one float32 scale per 1 x 128, on the fly (DeepSeek-V3, 3.3.2).

scale = amax / 448, or one for zeros; code = round(x / scale). Bit for bit what
`sglang_dspark.experts.fp8.quantise_activations` gives, but where float32 rounds a quotient onto a
tie that it misses by less than 2^-24.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.grouped_layout import FP8, SCALE_BLOCK

_ROWS = 16  # rows a program


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] bfloat16 -> codes [..., K] float8_e4m3fn, scales [..., ceil(K/128)] float32.

    Raises ValueError for another dtype or a tensor that is not contiguous.
    """
    if x.dtype != torch.bfloat16 or not x.is_contiguous() or x.dim() < 1:
        raise ValueError(f"FP8 rows: expected contiguous [..., K] bfloat16, found {x.dtype}")
    k = x.shape[-1]
    groups = triton.cdiv(k, SCALE_BLOCK)
    codes = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(*x.shape[:-1], groups, dtype=torch.float32, device=x.device)
    if codes.numel():
        rows = x.numel() // k
        _fp8_rows_kernel[(triton.cdiv(rows, _ROWS), groups)](x, codes, scales, rows, k, block=_ROWS)
    return codes, scales


@triton.jit
def to_fp8(values):
    """[128, rows] float32 -> values / scale, to be stored as FP8, and scales [rows]; NaN stays."""
    amax = tl.max(tl.abs(values), 0)
    scale = tl.where(amax > 0, tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38), 1.0)
    quotient = tl.div_rn(values, tl.broadcast_to(scale[None, :], values.shape))
    return tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL), scale


@triton.jit
def _fp8_rows_kernel(x, codes, scales, rows, k, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (column < k)[:, None] & (row < rows)[None, :]
    place = row[None, :] * k + column[:, None]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    quotient, scale = to_fp8(values)
    tl.store(codes + place, quotient.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row * tl.num_programs(1) + tl.program_id(1), scale, mask=row < rows)
