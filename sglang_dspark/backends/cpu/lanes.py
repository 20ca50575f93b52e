"""Sum float32 numbers in a fixed order, by explicit vector instructions.

A compiler that may reorder sums chooses by the surrounding code, which differs between a process
that compiles a function and one that reads it from disk. Two servers, or one server before and
after its first start, would then differ in last bits. These sums are bitwise the same in every
compilation and for every vector width of the processor.

Each is a Numba intrinsic: it writes the LLVM instructions of a loop into its caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from sglang_dspark.float_ops import fused

_FLOAT, _WORD, _PLACE = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_LANES = 64  # of a row's sum: several vectors, so that none waits for the addition before
_DOT_LANES = 16
_WIDE = llvm.get_host_cpu_features().get("avx512f", False)
_Combine = Callable[[Any, Any, Any], Any]  # (builder, x, y) -> x and y in one
_Chunk = Callable[[Any], Any]  # pointer of a row -> the vector at the loop's place


@intrinsic
def lane_sum(typingctx, row):  # type: ignore[no-untyped-def]
    """Sum a contiguous row [n] float32: lane i adds i, i + 64, ..., then upper halves are added
    to lower ones."""
    return _reduction(row, 0.0, _added)


@intrinsic
def lane_max(typingctx, row):  # type: ignore[no-untyped-def]
    """Return the largest number of a contiguous row [n] float32, ignoring NaN; -inf if none."""

    def larger(builder: Any, x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", y, x), y, x)

    return _reduction(row, -math.inf, larger)


@intrinsic
def dots(typingctx, keys, queries):  # type: ignore[no-untyped-def]
    """Multiply tuples of contiguous rows [n] float32: query 0 with all keys, then query 1, ...

    1, 2, 4, ... keys and queries, as their sums share the additions at the end. A product does not
    depend on the others: 16 lanes, then half by half.
    """
    _require_rows(*keys, *queries)
    if any(len(each) & (len(each) - 1) for each in (keys, queries)):
        raise TypingError(f"{len(keys)} keys and {len(queries)} queries are no powers of two")
    at_once = len(keys) if _WIDE else 1  # as many as keep their sums in registers

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        theirs, length = _pointers(context, builder, keys, arguments[0])
        ours, _ = _pointers(context, builder, queries, arguments[1])
        by_key: list[list[Any]] = []
        for first in range(0, len(theirs), at_once):
            by_key += _dots_of(builder, theirs[first : first + at_once], ours, length)
        by_query = [sums[q] for q in range(len(ours)) for sums in by_key]
        return context.make_tuple(builder, signature.return_type, by_query)

    count = len(keys) * len(queries)
    return types.UniTuple(types.float32, count)(keys, queries), codegen


@intrinsic
def add_weighted(typingctx, rows, weights, values):  # type: ignore[no-untyped-def]
    """Add all values to each row, one after the other: row r takes weights[r][v] * values[v].

    rows, values: tuples of contiguous rows [n] float32. weights: a tuple of tuples of float32.
    """
    _require_rows(*rows, *values)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        targets, length = _pointers(context, builder, rows, arguments[0])
        sources, _ = _pointers(context, builder, values, arguments[2])
        shares = [
            cgutils.unpack_tuple(builder, row)
            for row in cgutils.unpack_tuple(builder, arguments[1])
        ]
        whole = builder.sdiv(length, _WORD(_DOT_LANES))
        done = builder.mul(whole, _WORD(_DOT_LANES))
        _add_in_steps(builder, _DOT_LANES, (_WORD(0), whole), targets, shares, sources)
        _add_in_steps(builder, 1, (done, length), targets, shares, sources)
        return context.get_dummy_value()

    return types.void(rows, weights, values), codegen


def _require_rows(*rows: Any) -> None:
    for row in rows:
        if not (isinstance(row, types.Array) and row.ndim == 1 and row.layout == "C"):
            raise TypingError(f"{row} is no contiguous row")
        if row.dtype != types.float32:
            raise TypingError(f"{row} is not of float32")


def _added(builder: Any, x: Any, y: Any) -> Any:
    return builder.fadd(x, y)


def _reduction(row: Any, nothing: float, combine: _Combine) -> tuple[Any, Any]:
    """Signature and code of an intrinsic that combines all numbers of a row, `nothing` at first."""
    _require_rows(row)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data, length = _pointer(context, builder, row, arguments[0])
        kept = _begun(builder, _filled(nothing, _LANES))

        def add(chunk: _Chunk) -> None:
            builder.store(combine(builder, builder.load(kept), chunk(data)), kept)

        _chunks(builder, length, _filled(nothing, _LANES), add)
        return _folded(builder, [builder.load(kept)], combine)[0]

    return types.float32(row), codegen


def _dots_of(builder: Any, keys: list[Any], queries: list[Any], length: Any) -> list[list[Any]]:
    """Emit the product of each key with each query; all by their pointers."""
    nought = _filled(0.0, _DOT_LANES)
    kept = [[_begun(builder, nought) for _ in queries] for _ in keys]

    def add(chunk: _Chunk) -> None:
        others = [chunk(query) for query in queries]
        for key, totals in zip(keys, kept, strict=True):
            shared = chunk(key)
            for other, total in zip(others, totals, strict=True):
                builder.store(fused(builder, shared, other, builder.load(total)), total)

    _chunks(builder, length, nought, add)
    sums = _folded(builder, [builder.load(total) for row in kept for total in row], _added)
    return [sums[i : i + len(queries)] for i in range(0, len(sums), len(queries))]


def _add_in_steps(
    builder: Any,
    lanes: int,
    span: tuple[Any, Any],
    targets: list[Any],
    shares: list[list[Any]],
    sources: list[Any],
) -> None:
    """`add_weighted` of pointers, `lanes` numbers a step, from step span[0] to span[1]."""
    factors = [[_spread(builder, share, lanes) for share in row] for row in shares]
    with cgutils.for_range_slice(builder, *span, _WORD(1)) as (step, _):
        start = builder.mul(step, _WORD(lanes))
        values = [_load(builder, data, start, lanes) for data in sources]
        for target, row in zip(targets, factors, strict=True):
            total = _load(builder, target, start, lanes)
            for value, factor in zip(values, row, strict=True):
                total = fused(builder, factor, value, total)
            builder.store(total, _place(builder, target, start, lanes), align=4)


def _pointer(context: Any, builder: Any, kind: Any, array: Any) -> tuple[Any, Any]:
    """Return address and length of a row."""
    held = context.make_array(kind)(context, builder, array)
    return held.data, cgutils.unpack_tuple(builder, held.shape)[0]


def _pointers(context: Any, builder: Any, kinds: Any, given: Any) -> tuple[list[Any], Any]:
    """Return the addresses of a tuple's rows, and the length, which they share."""
    rows = [
        _pointer(context, builder, kind, array)
        for kind, array in zip(kinds, cgutils.unpack_tuple(builder, given), strict=True)
    ]
    return [data for data, _ in rows], rows[0][1]


def _vector(lanes: int) -> ir.Type:
    return _FLOAT if lanes == 1 else ir.VectorType(_FLOAT, lanes)


def _filled(number: float, lanes: int) -> ir.Constant:
    return ir.Constant(_vector(lanes), [number] * lanes)


def _begun(builder: Any, nothing: ir.Constant) -> Any:
    """Allocate a vector that is set to `nothing` each time this code runs."""
    room = cgutils.alloca_once(builder, nothing.type)
    builder.store(nothing, room)
    return room


def _spread(builder: Any, number: Any, lanes: int) -> Any:
    """Broadcast the number to every lane."""
    if lanes == 1:
        return number
    one = builder.insert_element(ir.Constant(_vector(lanes), ir.Undefined), number, _PLACE(0))
    return builder.shuffle_vector(one, one, _mask([0] * lanes))


def _mask(places: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_PLACE, len(places)), places)


def _place(builder: Any, data: Any, start: Any, lanes: int) -> Any:
    return builder.bitcast(builder.gep(data, [start]), _vector(lanes).as_pointer())


def _load(builder: Any, data: Any, start: Any, lanes: int) -> Any:
    return builder.load(_place(builder, data, start, lanes), align=4)


def _load_some(builder: Any, data: Any, start: Any, left: Any, nothing: ir.Constant) -> Any:
    """Load the first `left` numbers from `start`; the other lanes are those of `nothing`."""
    room = _begun(builder, nothing)
    numbers = builder.bitcast(room, _FLOAT.as_pointer())
    with cgutils.for_range(builder, left) as loop:
        value = builder.load(builder.gep(data, [builder.add(start, loop.index)]))
        builder.store(value, builder.gep(numbers, [loop.index]))
    return builder.load(room)


def _chunks(
    builder: Any, length: Any, nothing: ir.Constant, each: Callable[[_Chunk], None]
) -> None:
    """Emit each(chunk) for whole chunks of a row and for the rest, filled up with `nothing`.

    chunk(data) is the vector of a row at the current place of the loop.
    """
    lanes = nothing.type.count
    whole = builder.sdiv(length, _WORD(lanes))
    with cgutils.for_range(builder, whole) as loop:
        start = builder.mul(loop.index, _WORD(lanes))
        each(lambda data: _load(builder, data, start, lanes))
    done = builder.mul(whole, _WORD(lanes))
    left = builder.sub(length, done)
    with builder.if_then(builder.icmp_signed(">", left, _WORD(0)), likely=False):
        each(lambda data: _load_some(builder, data, done, left, nothing))


def _folded(builder: Any, vectors: list[Any], combine: _Combine) -> list[Any]:
    """Combine each vector's lanes: upper halves with lower ones until one lane remains.

    Two vectors become one whose segments are the halves of both, so that few shuffles serve all.
    """
    count, width = len(vectors), vectors[0].type.count  # width: lanes of a segment
    while width > 1:
        pairs = zip(vectors[::2], vectors[1::2] or vectors, strict=True)
        halves = [_halves(builder, *pair, width) for pair in pairs]
        vectors = [combine(builder, lower, upper) for lower, upper in halves]
        width //= 2
    lanes = vectors[0].type.count
    return [builder.extract_element(vectors[i // lanes], _PLACE(i % lanes)) for i in range(count)]


def _halves(builder: Any, first: Any, second: Any, width: int) -> list[Any]:
    """Return lower and upper halves of all segments of `width` lanes, of one vector (given twice)
    or of two."""
    lanes = first.type.count * (1 if first is second else 2)
    lower = [start + lane for start in range(0, lanes, width) for lane in range(width // 2)]
    upper = [lane + width // 2 for lane in lower]
    return [builder.shuffle_vector(first, second, _mask(each)) for each in (lower, upper)]
