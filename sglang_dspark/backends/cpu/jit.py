"""Numba settings and building blocks shared by the CPU kernels.

The kernels compile for the processor they run on (AVX2 or wider) at the first start and are cached
on disk, in a folder named after the source of them all. Division follows numpy (no
ZeroDivisionError), as a check would forbid vectors. Float operations are done as they are written:
compiled code differs from that read from disk, as more of it is compiled together, and only so have
both the same bits.
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
    """Where compiled kernels are kept: depends on the text of this folder and of what it calls."""
    here = sorted(Path(__file__).parent.glob("*.py"))
    return folder_of("kernels", [*here, Path(float_ops.__file__)])


def kernel(function: Callable[..., Any]) -> Any:
    """Compile for one thread; the caller holds no GIL meanwhile. Sums keep their order (those of
    lanes.py use vector registers all the same), zeros their signs.

    `fastmath` is said and not left out: Numba would hand on that of the first function that calls.
    """
    return kept(function, cache_folder, nogil=True, error_model="numpy", fastmath=False)


@intrinsic
def multiply_at(typingctx, entry, x, ldx, rows, block, w, n, k, out, threads):  # type: ignore[no-untyped-def]
    """`NarrowMatmul.call` (linear.py) by its address; all arguments int64."""
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
    """Signature and code of an intrinsic that takes an address (int64) for a pointer."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(types.int64), codegen


@intrinsic
def floats_at(typingctx, address):  # type: ignore[no-untyped-def]
    """The address (int64) as a pointer to float32."""
    return _pointer_to(types.float32)


@intrinsic
def bytes_at(typingctx, address):  # type: ignore[no-untyped-def]
    """The address (int64) as a pointer to uint8."""
    return _pointer_to(types.uint8)


@intrinsic
def in_parts(typingctx, run, threads, work, length, given):  # type: ignore[no-untyped-def]
    """`work(first, end, *given)` for parts of 0 .. length, taken by the threads of the pool.

    run: address of its entry (threads.py), threads: of how many it may take, length: all int64.
    given: a tuple. True, or False where a part raised something.
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
    """The function (data, first, end) of the module that calls `compiled` with what data holds: the
    tuple `given`, and a word that it sets where the call raised something."""
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
