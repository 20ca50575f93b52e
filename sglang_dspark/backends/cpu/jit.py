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
from numba.core import cgutils
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


@intrinsic
def in_parts(typingctx, run, threads, work, length, given):  # type: ignore[no-untyped-def]
    """Run `work(first, end, *given)` for parts of 0 .. length in the threads of the pool.

    run: address of the pool's entry (threads.py), threads: the most it may use, length: all int64.
    given: a tuple. Returns False where a part raised an exception, else True.
    """
    ours = work.get_call_type(typingctx, (types.int64, types.int64, *given.types), {})

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        word, code = ir.IntType(64), ir.IntType(8).as_pointer()
        part = _part(context, builder.module, work.dispatcher.get_compile_result(ours), given)
        shared = cgutils.pack_struct(builder, (arguments[4], word(0)))
        room = cgutils.alloca_once_value(builder, shared)
        function = ir.FunctionType(ir.VoidType(), [code, code, word, word])
        builder.call(
            builder.inttoptr(arguments[0], function.as_pointer()),
            [builder.bitcast(part, code), builder.bitcast(room, code), arguments[3], arguments[1]],
        )
        failed = builder.load(cgutils.gep_inbounds(builder, room, 0, 1))
        return builder.icmp_signed("==", failed, word(0))

    return types.boolean(types.int64, types.int64, work, types.int64, given), codegen


def _part(context: Any, module: Any, compiled: Any, given: Any) -> Any:
    """Emit the function (data, first, end) that calls `compiled` with the tuple `given` from data.

    data also holds a word that the function sets where the call raised an exception."""
    word = ir.IntType(64)
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), word, word])
    part = ir.Function(module, kind, module.get_unique_name("part"))
    part.linkage = "internal"
    builder = ir.IRBuilder(part.append_basic_block("entry"))
    held = ir.LiteralStructType([context.get_value_type(given), word]).as_pointer()
    data = builder.bitcast(part.args[0], held)
    values = cgutils.unpack_tuple(builder, builder.load(cgutils.gep_inbounds(builder, data, 0, 0)))
    context.active_code_library.add_linking_library(compiled.library)
    what = compiled.fndesc
    status, _ = context.call_conv.call_function(
        builder, context.declare_function(module, what), what.restype, what.argtypes,
        [part.args[1], part.args[2], *values],
    )  # fmt: skip
    with cgutils.if_unlikely(builder, status.is_error):
        builder.store(word(1), cgutils.gep_inbounds(builder, data, 0, 1))
    builder.ret_void()
    return part
