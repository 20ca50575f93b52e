"""Compute exp of float32 in a form that vectorises, for functions that Numba compiles.

`exp32` of csrc/lanes.h returns bitwise the same values.
"""

from __future__ import annotations

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)
_HIGHEST = np.float32(88.0)
_FUSES = llvm.get_host_cpu_features().get("fma", True)  # named on x86 only; ARM always has it


@intrinsic
def float_from_bits(typingctx, bits):  # type: ignore[no-untyped-def]
    """Return the float32 whose bit pattern is the int32 `bits`."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def fma(typingctx, x, y, z):  # type: ignore[no-untyped-def]
    """Return x y + z of float32, rounded once (twice on processors without such an instruction).

    Explicit, because otherwise the surrounding code decides whether the compiler fuses.
    """

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        x, y, z = arguments
        return builder.fma(x, y, z) if _FUSES else builder.fadd(builder.fmul(x, y), z)

    return types.float32(types.float32, types.float32, types.float32), codegen


@njit(fastmath=False)  # otherwise it inherits that of the first kernel that compiles it
def exp32(x):  # type: ignore[no-untyped-def]
    """Compute exp of a float32 to within 2e-7 relative; below -87 (-inf too) about 1.6e-38, not 0.

    Uses 2**n * exp(r) with |r| <= ln(2)/2 and a polynomial (Cephes' expf), which vectorises,
    unlike the library's exp.
    """
    x = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(fma(x, _LOG2E, np.float32(0.5)))
    r = fma(-n, _LN2_LOW, fma(-n, _LN2_HIGH, x))
    p = np.float32(1.9875691500e-4)
    p = fma(p, r, np.float32(1.3981999507e-3))
    p = fma(p, r, np.float32(8.3334519073e-3))
    p = fma(p, r, np.float32(4.1665795894e-2))
    p = fma(p, r, np.float32(1.6666665459e-1))
    p = fma(p, r, np.float32(5.0000001201e-1))
    p = fma(p, r * r, r) + np.float32(1.0)
    return p * float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
