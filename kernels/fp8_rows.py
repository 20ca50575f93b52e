"""Quantise activations to FP8 E4M3, one float32 scale per 1 x 128 (DeepSeek-V3, 3.3.2).

scale = amax / 448, or one for zeros; code = round(x / scale). Bitwise the same as
`sglang_dspark.quantisation.fp8.quantise_activations`, except where float32 rounds a quotient
onto a tie that it misses by less than 2^-24.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.grouped_layout import FP8, SCALE_BLOCK
from sglang_dspark.kernels.rounding import fp8_quotients, narrowed

_ROWS = 16  # rows of a program


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [..., K] bfloat16: codes [..., K] float8_e4m3fn, scales [..., ceil(K/128)] float32.

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
        _fp8_rows_kernel[(triton.cdiv(rows, _ROWS), groups)](
            x, codes, scales, rows, k, interpreted=not x.is_cuda, block=_ROWS
        )
    return codes, scales


@triton.jit
def _fp8_rows_kernel(x, codes, scales, rows, k, interpreted: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (column < k)[:, None] & (row < rows)[None, :]
    place = row[None, :] * k + column[:, None]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    quotient, scale = fp8_quotients(values)
    tl.store(codes + place, narrowed(quotient, codes.dtype.element_ty, interpreted), mask=inside)
    tl.store(scales + row * tl.num_programs(1) + tl.program_id(1), scale, mask=row < rows)
