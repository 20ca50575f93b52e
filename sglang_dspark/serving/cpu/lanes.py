"""Sums of float32 numbers in an order that is said here and not chosen by the compiler.

A compiler that may reorder sums does so by what stands around them, and differently when the code
around was read from disk: two servers, or one before and after its first start, would then differ
in last bits. These sums are explicit vector instructions without such licence, so their bits are
the same wherever they are compiled in, on processors with 4, 8 or 16 lanes alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from sglang_dspark.float_ops import fused

_FLOAT, _WORD = ir.FloatType(), ir.IntType(64)
_LANES = 64  # several vectors, so that none waits for the addition before
_DOT_LANES = 16
_DOTS = 4
_Combine = Callable[[Any, Any, Any], Any]  # (builder, x, y) -> x and y in one
_Chunk = Callable[[Any], Any]  # pointer of a row -> the vector at the loop's place


@intrinsic
def lane_sum(typingctx, row):  # type: ignore[no-untyped-def]
    """Sum of a contiguous row [n] float32: lane i adds i, i + 64, ..., then the lanes pairwise."""
    return _reduction(row, 0.0, lambda builder, x, y: builder.fadd(x, y))


@intrinsic
def lane_max(typingctx, row):  # type: ignore[no-untyped-def]
    """Largest number of a contiguous row [n] float32, NaN passed over; -inf where there is none."""

    def larger(builder: Any, x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", y, x), y, x)

    return _reduction(row, -math.inf, larger)


def _reduction(row: Any, nothing: float, combine: _Combine) -> tuple[Any, Any]:
    """Signature and code of an intrinsic that combines all numbers of a row, `nothing` at first."""
    _require_rows(row)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data, length = _row(context, builder, row, arguments[0])
        kept = cgutils.alloca_once_value(builder, _filled(nothing, _LANES))

        def add(chunk: _Chunk) -> None:
            builder.store(combine(builder, builder.load(kept), chunk(data)), kept)

        _chunks(builder, length, _LANES, nothing, add)
        return _folded(builder, [builder.load(kept)], combine)[0]

    return types.float32(row), codegen


@intrinsic
def four_dots(typingctx, key, a, b, c, d):  # type: ignore[no-untyped-def]
    """(key . a, key . b, key . c, key . d) of contiguous rows [n] float32; one read of the key."""
    given = (key, a, b, c, d)
    _require_rows(*given)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        rows = [_row(context, builder, *each) for each in zip(given, arguments, strict=True)]
        nought = _filled(0.0, _DOT_LANES)
        kept = [cgutils.alloca_once_value(builder, nought) for _ in range(_DOTS)]

        def add(chunk: _Chunk) -> None:
            shared = chunk(rows[0][0])
            for (data, _), total in zip(rows[1:], kept, strict=True):
                builder.store(fused(builder, shared, chunk(data), builder.load(total)), total)

        _chunks(builder, rows[0][1], _DOT_LANES, 0.0, add)
        sums = _folded(builder, [builder.load(each) for each in kept], lambda b, x, y: b.fadd(x, y))
        return context.make_tuple(builder, signature.return_type, sums)

    return types.UniTuple(types.float32, _DOTS)(*given), codegen


def _require_rows(*rows: Any) -> None:
    for row in rows:
        if not (isinstance(row, types.Array) and row.ndim == 1 and row.layout == "C"):
            raise TypingError(f"{row} is no contiguous row")
        if row.dtype != types.float32:
            raise TypingError(f"{row} is not of float32")


def _row(context: Any, builder: Any, kind: Any, array: Any) -> tuple[Any, Any]:
    """Pointer and length of a row."""
    held = context.make_array(kind)(context, builder, array)
    return held.data, cgutils.unpack_tuple(builder, held.shape)[0]


def _vector(lanes: int) -> ir.VectorType:
    return ir.VectorType(_FLOAT, lanes)


def _filled(number: float, lanes: int) -> ir.Constant:
    return ir.Constant(_vector(lanes), [number] * lanes)


def _chunks(
    builder: Any, length: Any, lanes: int, nothing: float, each: Callable[[_Chunk], None]
) -> None:
    """Emit each(chunk) for whole chunks of `lanes` numbers and for the rest, filled with `nothing`.

    chunk(data) is the vector of a row at the place that the loop has come to.
    """
    whole = builder.sdiv(length, _WORD(lanes))
    with cgutils.for_range(builder, whole) as loop:
        start = builder.mul(loop.index, _WORD(lanes))
        each(lambda data: _load(builder, data, start, lanes))
    start = builder.mul(whole, _WORD(lanes))
    left = builder.sub(length, start)
    with builder.if_then(builder.icmp_signed(">", left, _WORD(0)), likely=False):
        each(lambda data: _load_some(builder, data, start, left, _filled(nothing, lanes)))


def _load(builder: Any, data: Any, start: Any, lanes: int) -> Any:
    place = builder.bitcast(builder.gep(data, [start]), _vector(lanes).as_pointer())
    return builder.load(place, align=4)


def _load_some(builder: Any, data: Any, start: Any, left: Any, filled: ir.Constant) -> Any:
    """The first `left` numbers from `start`, the rest of the lanes as they are in `filled`."""
    room = cgutils.alloca_once_value(builder, filled)
    builder.store(filled, room)
    numbers = builder.bitcast(room, _FLOAT.as_pointer())
    with cgutils.for_range(builder, left) as loop:
        value = builder.load(builder.gep(data, [builder.add(start, loop.index)]))
        builder.store(value, builder.gep(numbers, [loop.index]))
    return builder.load(room)


def _folded(builder: Any, vectors: list[Any], combine: _Combine) -> list[Any]:
    """Each vector's lanes combined: upper halves with lower ones until one lane is left.

    Two vectors become one whose segments are the halves of both, so that few shuffles serve all.
    """
    count, width = len(vectors), vectors[0].type.count  # width: lanes of a segment
    while width > 1:
        pairs = zip(vectors[::2], vectors[1::2] or vectors, strict=True)
        halves = [_halves(builder, *pair, width) for pair in pairs]
        vectors = [combine(builder, lower, upper) for lower, upper in halves]
        width //= 2
    return [builder.extract_element(vectors[0], ir.IntType(32)(i)) for i in range(count)]


def _halves(builder: Any, first: Any, second: Any, width: int) -> list[Any]:
    """Lower and upper halves of all segments of `width` lanes, of one vector (given twice) or of
    two."""
    lanes = first.type.count * (1 if first is second else 2)
    lower = [start + lane for start in range(0, lanes, width) for lane in range(width // 2)]

    def taken(chosen: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(chosen)), chosen)
        return builder.shuffle_vector(first, second, mask)

    return [taken(lower), taken([lane + width // 2 for lane in lower])]
