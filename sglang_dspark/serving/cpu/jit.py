"""Numba settings and building blocks shared by the CPU kernels.

The kernels compile for the processor they run on (AVX2 or wider) at the first start and are cached
on disk, in a folder named after the source of them all: Numba itself looks at the file of a kernel
only, and would keep the old code of a function that the kernel calls from another file. Sums may be
reassociated, which is what lets them use vector registers; NaN and infinity keep their meaning.
Division follows numpy (no ZeroDivisionError), as a check would forbid vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sglang_dspark.paths import cache_root

FAST = {"reassoc", "contract", "nsz", "arcp"}

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)
_HIGHEST = np.float32(88.0)


@cache
def cache_folder() -> Path:
    """Where compiled kernels are kept: depends on the text of every file of this folder."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return cache_root() / "sglang-dspark" / "kernels" / digest.hexdigest()[:16]


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    ordinary = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_folder())  # read while a function is wrapped
    try:
        return njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    finally:
        numba.config.CACHE_DIR = ordinary


def kernel(function: Callable[..., Any]) -> Any:
    """Compile for one thread; the caller holds no GIL meanwhile."""
    return _compiled(function, fastmath=FAST)


def exact_kernel(function: Callable[..., Any]) -> Any:
    """As `kernel`, with float operations as they are written: signs of zero, order of sums."""
    return _compiled(function)


def parallel_kernel(function: Callable[..., Any]) -> Any:
    """Compile with `prange` loops spread over Numba's threads."""
    return _compiled(function, fastmath=FAST, parallel=True)


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


@intrinsic
def multiply_at(typingctx, entry, x, ldx, rows, block, w, n, k, out, threads):  # type: ignore[no-untyped-def]
    """`NarrowMatmul.call` (narrow_matmul.py) by its address; all arguments int64."""
    word, code = ir.IntType(64), ir.IntType(8).as_pointer()

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        function = ir.FunctionType(
            ir.VoidType(),
            [code, word, word, word, code, word, word, code, ir.IntType(32)],
        )
        callee = builder.inttoptr(arguments[0], function.as_pointer())
        given = list(arguments[1:])
        for place in (0, 4, 7):
            given[place] = builder.inttoptr(given[place], code)
        given[8] = builder.trunc(given[8], ir.IntType(32))
        builder.call(callee, given)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 10), codegen


@intrinsic
def floats_at(typingctx, address):  # type: ignore[no-untyped-def]
    """The address (int64) as a pointer to float32."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), codegen


@njit(fastmath={"contract"})
def exp32(x):  # type: ignore[no-untyped-def]
    """exp of a float32 to within 2e-7 relative; below -87 (-inf too) about 1.6e-38, not 0.

    2**n * exp(r) with |r| <= ln(2)/2 and a polynomial (Cephes' expf): unlike the library's exp it
    vectorises. Not reassociated: the two-part ln(2) would collapse into one and lose digits.
    """
    x = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(x * _LOG2E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    return p * float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
