"""Compile the CPU kernels with Numba, and provide the intrinsics that they share.

The kernels compile for the processor that they run on (AVX2 or wider) at the first start, and are
cached on disk in a folder named by a hash of their source. Division follows numpy (no
ZeroDivisionError), as a check would prevent vectorisation. Float operations run as they are
written: newly compiled code is optimised across more functions than code read from disk, and both
must give bitwise the same results.
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


@cache
def cache_folder() -> Path:
    """Return the cache folder, named by the source of this folder and of what it calls."""
    here = sorted(Path(__file__).parent.glob("*.py"))
    return folder_of("kernels", [*here, Path(float_ops.__file__)])


def kernel(function: Callable[..., Any]) -> Any:
    """Compile for one thread, without the GIL; sums keep their order and zeros their signs.

    The sums of lanes.py use vector registers nevertheless. `fastmath` is explicit, as Numba would
    otherwise inherit it from the first caller.
    """
    return kept(function, cache_folder, nogil=True, error_model="numpy", fastmath=False)


@intrinsic
def multiply_at(typingctx, entry, x, ldx, rows, block, w, n, k, out, threads):  # type: ignore[no-untyped-def]
    """Call `NarrowMatmul.call` (linear.py) by its address; all arguments int64."""
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


def _pointer_to(kind: Any) -> Any:
    """Return signature and code of an intrinsic that casts an address (int64) to a pointer."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(types.int64), codegen


@intrinsic
def floats_at(typingctx, address):  # type: ignore[no-untyped-def]
    """Cast an address (int64) to a pointer to float32."""
    return _pointer_to(types.float32)


@intrinsic
def bytes_at(typingctx, address):  # type: ignore[no-untyped-def]
    """Cast an address (int64) to a pointer to uint8."""
    return _pointer_to(types.uint8)
