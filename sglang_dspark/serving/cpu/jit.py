"""Numba settings and building blocks shared by the CPU kernels.

The kernels compile for the processor they run on (AVX2 or wider) at the first start and are cached
on disk, in a folder named after the source of them all. Sums may be reassociated, which is what
lets them use vector registers; NaN and infinity keep their meaning. Division follows numpy (no
ZeroDivisionError), as a check would forbid vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sglang_dspark import float_ops
from sglang_dspark.common.machine_code import folder_of, kept

FAST = {"reassoc", "contract", "nsz", "arcp"}


@cache
def cache_folder() -> Path:
    """Where compiled kernels are kept: depends on the text of this folder and of what it calls."""
    here = sorted(Path(__file__).parent.glob("*.py"))
    return folder_of("kernels", [*here, Path(float_ops.__file__)])


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    return kept(function, cache_folder, nogil=True, error_model="numpy", **options)


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
