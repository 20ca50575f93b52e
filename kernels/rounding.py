"""Round to narrow floating-point types in kernels as hardware does: to nearest, ties to even.

Triton's interpreter truncates to BF16 and loses a carry on the way to FP8. So a kernel that it runs
first rounds values to the narrow grid, where conversion is exact; compiled kernels
convert in one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrowed(values, dtype: tl.constexpr, interpreted: tl.constexpr):
    """Round float32 values to `dtype` (float32, bfloat16, float8e4nv); FP8 ones within +-448."""
    if interpreted:
        if dtype == tl.bfloat16:
            values = _cut(values, 16)
        elif dtype == tl.float8e4nv:
            fine = (values + 24576.0) - 24576.0  # steps of 2^-9, below the normal numbers
            values = tl.where(tl.abs(values) < 0.015625, fine, _cut(values, 20))
    return values.to(dtype)


@triton.jit
def _cut(values, low: tl.constexpr):
    """Drop the `low` lowest bits, rounding to nearest even."""
    bits = values.to(tl.int32, bitcast=True)
    up = bits + ((1 << (low - 1)) - 1) + ((bits >> low) & 1)
    kept = (up >> low) << low
    return tl.where(values == values, kept, bits).to(tl.float32, bitcast=True)


@triton.jit
def fp8_quotients(values):
    """Divide columns of [128, *] float32 by their scales; return quotients within +-448 and the
    scales amax / 448 [*]. A column of zeros has scale one; NaN stays NaN."""
    amax = tl.max(tl.abs(values), 0)
    scale = tl.where(amax > 0, tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38), 1.0)
    quotient = tl.div_rn(values, tl.broadcast_to(scale[None, :], values.shape))
    return tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL), scale
