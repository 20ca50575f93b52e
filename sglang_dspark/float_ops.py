"""Float32 building blocks of functions that Numba compiles: bits, x y + z, an exp that vectorises.

Each gives the same bits wherever it is compiled in."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)
_HIGHEST = np.float32(88.0)
_FUSES = llvm.get_host_cpu_features().get("fma", True)  # named on x86 alone; ARM has always had it


@intrinsic
def float_from_bits(typingctx, bits):  # type: ignore[no-untyped-def]
    """The float32 whose bit pattern is the int32 `bits`."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def bits_of_float(typingctx, value):  # type: ignore[no-untyped-def]
    """The bit pattern of a float32 as int32."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), codegen


def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """The instruction of `fma` for LLVM values of one type: float or a vector of them."""
    if not _FUSES:
        return builder.fadd(builder.fmul(x, y), z)
    kind = x.type
    name = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    function = ir.FunctionType(kind, [kind] * 3)
    called = cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.{name}")
    return builder.call(called, [x, y, z])


@intrinsic
def fma(typingctx, x, y, z):  # type: ignore[no-untyped-def]
    """x y + z of float32, rounded once (twice on processors without such an instruction).

    Said here and not left to the compiler, which fuses or not by what stands around it.
    """

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return fused(builder, *arguments)

    return types.float32(types.float32, types.float32, types.float32), codegen


@njit(fastmath=False)  # else that of the kernel that it is first compiled for
def exp32(x):  # type: ignore[no-untyped-def]
    """exp of a float32 to within 2e-7 relative; below -87 (-inf too) about 1.6e-38, not 0.

    2**n * exp(r) with |r| <= ln(2)/2 and a polynomial (Cephes' expf): unlike the library's exp it
    vectorises.
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
