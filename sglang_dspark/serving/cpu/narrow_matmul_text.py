"""LLVM assembly of the matrix kernel: out = x W^T with few rows of x (narrow_matmul.py).

Written here, as the blocking needs control over registers that Numba's vectoriser does not give. A
bfloat16 W is widened to float32 in registers, a row once for all rows of x, or meets bfloat16 rows
(bfloat16_product_text.py); int8 has its own way to multiply (int8_product_text.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dspark.serving.cpu import bfloat16_product_text as bfloat16
from sglang_dspark.serving.cpu import byte_product_text as byte
from sglang_dspark.serving.cpu import int8_product_text as int8
from sglang_dspark.serving.cpu.thread_pool import RUN
from sglang_dspark.serving.cpu.weight_formats import (
    BYTES,
    FLOAT32,
    GROUP,
    INT8,
    PANELS,
    WeightFormat,
)

LANES = 16
MAX_BLOCK_ROWS = 6
_STRIP = 64  # rows of W kept in the second-level cache while further rows of x pass over them
_VECTOR = f"<{LANES} x float>"
_INTS = f"<{LANES} x i32>"
_SIXTEEN = f"<{', '.join(['i32 16'] * LANES)}>"

# x rows in a block -> rows of W taken together (each divides LANES). 16 vector registers of 8
# floats hold 6 accumulators of 16 lanes beside the operands, 32 registers of 16 floats hold 24.
_W_ROWS_NARROW = {1: 4, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1}
_W_ROWS_WIDE = dict.fromkeys(range(1, MAX_BLOCK_ROWS + 1), 4)
# Cache level that W is fetched into -> what the instruction calls it. Into the second level it can
# come from further ahead; the first has room for the next rows beside the current ones.
_LOCALITY = {1: 3, 2: 2}
_AHEAD = 8192  # bytes, into the second level


@dataclass(frozen=True)
class _Way:
    """What one way to multiply has of its own: the type of a number of x in its kernels, their
    texts by how many rows of x they take, from one on, and what stands around the job."""

    x_type: str
    blocks: tuple[str, ...]
    before: str = ""
    behind: str = ""
    declarations: str = ""


def assembly(
    form: WeightFormat, *, wide: bool, threaded: bool, level: int, rounding: bool = False
) -> str:
    """The module as LLVM assembly text.

    level: of the cache that weights are fetched into, 1 or 2 (int8's own ways do not ask).
    rounding: whether rows of x are rounded to bfloat16 before they meet such weights.
    """
    way = _way(form, wide=wide, level=level, rounding=rounding)
    width = "512" if wide else "256"
    table = ", ".join(f"ptr @block{m}" for m in range(1, len(way.blocks) + 1))
    parts = [*way.blocks, f"@blocks = private constant [{len(way.blocks)} x ptr] [{table}]"]
    bytes_of_row = "\n".join(_row_bytes(form)) + "\n"
    parts.append(_STRIPS.replace("  ; %bytes\n", bytes_of_row).replace("X_TYPE", way.x_type))
    entry = _ENTRY_THREADED if threaded else _ENTRY_SINGLE
    parts.append(entry.replace("  ; before\n", way.before).replace("  ; behind\n", way.behind))
    parts.append(way.declarations)
    parts.append(f"declare {_VECTOR} @llvm.fma.v{LANES}f32({_VECTOR}, {_VECTOR}, {_VECTOR})")
    parts.append("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
    parts.append("declare i64 @llvm.smin.i64(i64, i64)")
    parts.append(f'attributes #0 = {{ nounwind "prefer-vector-width"="{width}" }}')
    parts.append(f'attributes #1 = {{ alwaysinline nounwind "prefer-vector-width"="{width}" }}')
    return "\n".join(parts)


def _way(form: WeightFormat, *, wide: bool, level: int, rounding: bool) -> _Way:
    few = range(1, MAX_BLOCK_ROWS + 1)
    if form is INT8:
        blocks = tuple(int8.block_kernel(m, wide=wide) for m in few)
        return _Way("i16", blocks, int8.ENTRY, int8.EXIT, int8.declarations(wide=wide))
    if form is BYTES:
        blocks = tuple(byte.block_kernel(m) for m in few)
        return _Way("i8", blocks, byte.ENTRY, int8.EXIT, byte.DECLARATIONS)
    if rounding:
        blocks = tuple(
            _block_kernel(form, m, r, level, "bfloat", bfloat16.step(m, r))
            for m, r in bfloat16.W_ROWS.items()
        )
        return _Way("bfloat", blocks, bfloat16.ENTRY, bfloat16.EXIT, bfloat16.DECLARATIONS)
    blocks = tuple(
        _block_kernel(form, m, r, level, "float", _widened(form, m, r))
        for m, r in (_W_ROWS_WIDE if wide else _W_ROWS_NARROW).items()
    )
    return _Way("float", blocks)


def _block_kernel(
    form: WeightFormat, m: int, r: int, level: int, x_type: str, step: list[str]
) -> str:
    """`block<m>`: m rows of x against n rows of W, r at a time (r divides n). step: makes
    `%t{p}_{q}.next` of `%t{p}_{q}`, at column `%c`."""
    a, j = range(r), range(m)
    lines = [
        f"define private void @block{m}(ptr noalias %x, i64 %ldx, ptr noalias %w, i64 %k, "
        "ptr noalias %out, i64 %ldo, i64 %n) #0 {",
        "entry:",
        *(f"  %xo{q} = mul i64 %ldx, {q}" for q in j),
        *(f"  %x{q} = getelementptr {x_type}, ptr %x, i64 %xo{q}" for q in j),
        *_row_bytes(form),
        f"  %ahead = {f'mul i64 %bytes, {max(2, r)}' if level == 1 else f'add i64 {_AHEAD}, 0'}",
        "  br label %rows",
        "rows:",
        "  %i = phi i64 [ 0, %entry ], [ %i.next, %reduce ]",
        *(f"  %i{p} = add i64 %i, {p}" for p in a),
        *(f"  %wo{p} = mul i64 %i{p}, %bytes" for p in a),
        *(f"  %w{p} = getelementptr i8, ptr %w, i64 %wo{p}" for p in a),
        "  br label %dot",
        "dot:",
        "  %c = phi i64 [ 0, %rows ], [ %c.next, %dot ]",
    ]
    for p in a:
        for q in j:
            start = f"[ zeroinitializer, %rows ], [ %t{p}_{q}.next, %dot ]"
            lines.append(f"  %t{p}_{q} = phi {_VECTOR} {start}")
    lines += _dot_body(form, r, level, step)
    lines += _reduction([(p, q) for q in j for p in a])
    lines += [
        f"  %i.next = add i64 %i, {r}",
        "  %again = icmp slt i64 %i.next, %n",
        "  br i1 %again, label %rows, label %exit",
        "exit:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def _row_bytes(form: WeightFormat) -> list[str]:
    """%bytes from one row of W to the next, by %k; as `WeightFormat.row_bytes`."""
    if form in PANELS:
        return [
            f"  %scale.bytes = sdiv i64 %k, {GROUP // 4}",
            "  %bytes = add i64 %k, %scale.bytes",
        ]
    return [f"  %bytes = mul i64 %k, {form.dtype.itemsize}"]


def _dot_body(form: WeightFormat, r: int, level: int, step: list[str]) -> list[str]:
    """One step over k, which multiplies a format's columns of r rows of W with rows of x.

    A step takes 64 bytes of float32 and of packed weights, a cache line, which is what one prefetch
    brings.
    """
    lines: list[str] = []
    for p in range(r):
        lines += [
            f"  %pf.o{p} = mul i64 %c, {form.dtype.itemsize}",
            f"  %pf.a{p} = add i64 %pf.o{p}, %ahead",
            f"  %pf{p} = getelementptr i8, ptr %w{p}, i64 %pf.a{p}",
            f"  call void @llvm.prefetch.p0(ptr %pf{p}, i32 0, i32 {_LOCALITY[level]}, i32 1)",
        ]
    return [
        *lines,
        *step,
        f"  %c.next = add i64 %c, {form.columns}",
        "  %more = icmp slt i64 %c.next, %k",
        "  br i1 %more, label %dot, label %reduce",
        "reduce:",
    ]


def _widened(form: WeightFormat, m: int, r: int) -> list[str]:
    """A step with W widened to float32, LANES columns a part."""
    lines: list[str] = []
    parts = form.columns // LANES
    for part in range(parts):
        before = "" if part == 0 else f".{part - 1}"
        now = ".next" if part == parts - 1 else f".{part}"
        lines.append(f"  %c{part} = add i64 %c, {part * LANES}")
        for p in range(r):
            lines += _load_weights(form, p, part)
        for q in range(m):
            lines += [
                f"  %px{q}_{part} = getelementptr float, ptr %x{q}, i64 %c{part}",
                f"  %vx{q}_{part} = load {_VECTOR}, ptr %px{q}_{part}, align 4",
            ]
            for p in range(r):
                factors = f"{_VECTOR} %vw{p}_{part}, {_VECTOR} %vx{q}_{part}"
                lines.append(
                    f"  %t{p}_{q}{now} = call {_VECTOR} @llvm.fma.v{LANES}f32("
                    f"{factors}, {_VECTOR} %t{p}_{q}{before})"
                )
    return lines


def _load_weights(form: WeightFormat, p: int, part: int) -> list[str]:
    """LANES weights of row p as float32: `dense` in registers."""
    at, to = f"{p}_{part}", f"%vw{p}_{part}"
    if form is FLOAT32:
        return [
            f"  %pw{at} = getelementptr float, ptr %w{p}, i64 %c{part}",
            f"  {to} = load {_VECTOR}, ptr %pw{at}, align 4",
        ]
    return [
        f"  %pw{at} = getelementptr i16, ptr %w{p}, i64 %c{part}",
        f"  %h{at} = load <{LANES} x i16>, ptr %pw{at}, align 2",
        f"  %z{at} = zext <{LANES} x i16> %h{at} to {_INTS}",
        f"  %u{at} = shl {_INTS} %z{at}, {_SIXTEEN}",
        f"  {to} = bitcast {_INTS} %u{at} to {_VECTOR}",
    ]


def _reduction(sums: list[tuple[int, int]]) -> list[str]:
    """Sum the lanes of every accumulator and store: halves first, two accumulators at a time.

    After each level a vector holds twice as many accumulators with half as many partial sums each;
    which accumulators meet in a vector does not change the order within one.
    """
    lines: list[str] = []
    vectors = [f"%t{p}_{q}.next" for p, q in sums]
    size = LANES
    level = 0
    while size > 1:
        half = size // 2
        starts = range(0, 2 * LANES, size)
        low = [s + lane for s in starts for lane in range(half)]
        high = [index + half for index in low]
        joined = []
        for index in range(0, len(vectors), 2):
            first = vectors[index]
            second = vectors[index + 1] if index + 1 < len(vectors) else "zeroinitializer"
            name = f"%r{level}_{index}"
            for suffix, lanes in (("l", low), ("h", high)):
                mask = ", ".join(f"i32 {lane}" for lane in lanes)
                lines.append(
                    f"  {name}{suffix} = shufflevector {_VECTOR} {first}, {_VECTOR} {second}, "
                    f"{_INTS} <{mask}>"
                )
            lines.append(f"  {name} = fadd {_VECTOR} {name}l, {name}h")
            joined.append(name)
        vectors, size, level = joined, half, level + 1
    return [*lines, *_stores(sums, vectors)]


def _stores(sums: list[tuple[int, int]], vectors: list[str]) -> list[str]:
    """Write the sums, a lane each, to their places of the result."""
    lines: list[str] = []
    for place, (p, q) in enumerate(sums):
        vector, lane = divmod(place, LANES)
        lines += [
            f"  %e{place} = extractelement {_VECTOR} {vectors[vector]}, i32 {lane}",
            f"  %oj{place} = mul i64 %ldo, {q}",
            f"  %oi{place} = add i64 %oj{place}, %i{p}",
            f"  %po{place} = getelementptr float, ptr %out, i64 %oi{place}",
            f"  store float %e{place}, ptr %po{place}, align 4",
        ]
    return lines


_STRIPS = f"""
%job = type {{ ptr, i64, i64, i64, ptr, i64, i64, ptr }}
define private void @strips(ptr %job, i64 %first, i64 %end) #0 {{
entry:
  %empty = icmp sge i64 %first, %end
  br i1 %empty, label %exit, label %load
load:
  %x = load ptr, ptr %job
  %ldx.p = getelementptr %job, ptr %job, i32 0, i32 1
  %ldx = load i64, ptr %ldx.p
  %m.p = getelementptr %job, ptr %job, i32 0, i32 2
  %m = load i64, ptr %m.p
  %block.p = getelementptr %job, ptr %job, i32 0, i32 3
  %block = load i64, ptr %block.p
  %w.p = getelementptr %job, ptr %job, i32 0, i32 4
  %w = load ptr, ptr %w.p
  %n.p = getelementptr %job, ptr %job, i32 0, i32 5
  %n = load i64, ptr %n.p
  %k.p = getelementptr %job, ptr %job, i32 0, i32 6
  %k = load i64, ptr %k.p
  %out.p = getelementptr %job, ptr %job, i32 0, i32 7
  %out = load ptr, ptr %out.p
  ; %bytes
  br label %strip
strip:
  %i = phi i64 [ %first, %load ], [ %i.next, %strip.end ]
  %left = sub i64 %end, %i
  %rows = call i64 @llvm.smin.i64(i64 %left, i64 {_STRIP})
  %wo = mul i64 %i, %bytes
  %wi = getelementptr i8, ptr %w, i64 %wo
  br label %blocks
blocks:
  %j = phi i64 [ 0, %strip ], [ %j.next, %blocks ]
  %unseen = sub i64 %m, %j
  %count = call i64 @llvm.smin.i64(i64 %unseen, i64 %block)
  %slot = sub i64 %count, 1
  %kernel.p = getelementptr ptr, ptr @blocks, i64 %slot
  %kernel = load ptr, ptr %kernel.p
  %xo = mul i64 %j, %ldx
  %xj = getelementptr X_TYPE, ptr %x, i64 %xo
  %oo = mul i64 %j, %n
  %oi = add i64 %oo, %i
  %outj = getelementptr float, ptr %out, i64 %oi
  call void %kernel(ptr %xj, i64 %ldx, ptr %wi, i64 %k, ptr %outj, i64 %n, i64 %rows)
  %j.next = add i64 %j, %block
  %j.more = icmp slt i64 %j.next, %m
  br i1 %j.more, label %blocks, label %strip.end
strip.end:
  %i.next = add i64 %i, %rows
  %i.more = icmp slt i64 %i.next, %end
  br i1 %i.more, label %strip, label %exit
exit:
  ret void
}}
"""
_ENTRY_HEAD = """
define void @narrow_matmul(ptr %x, i64 %ldx, i64 %m, i64 %block, ptr %w, i64 %n, i64 %k, ptr %out,
                           i32 %threads) #0 {
entry:
  %job = alloca %job
  store ptr %x, ptr %job
  %p1 = getelementptr %job, ptr %job, i32 0, i32 1
  store i64 %ldx, ptr %p1
  %p2 = getelementptr %job, ptr %job, i32 0, i32 2
  store i64 %m, ptr %p2
  %p3 = getelementptr %job, ptr %job, i32 0, i32 3
  store i64 %block, ptr %p3
  %p4 = getelementptr %job, ptr %job, i32 0, i32 4
  store ptr %w, ptr %p4
  %p5 = getelementptr %job, ptr %job, i32 0, i32 5
  store i64 %n, ptr %p5
  %p6 = getelementptr %job, ptr %job, i32 0, i32 6
  store i64 %k, ptr %p6
  %p7 = getelementptr %job, ptr %job, i32 0, i32 7
  store ptr %out, ptr %p7
  ; before
"""
_ENTRY_SINGLE = f"""{_ENTRY_HEAD}
  call void @strips(ptr %job, i64 0, i64 %n)
  ; behind
  ret void
}}
"""
# The rows of W are shared out in whole groups of LANES; no thread writes what another one does.
_ENTRY_THREADED = f"""
declare void @{RUN}(ptr, ptr, i64, i64)
define private void @share(ptr %job, i64 %a, i64 %b) #0 {{
entry:
  %first = mul i64 %a, {LANES}
  %end = mul i64 %b, {LANES}
  call void @strips(ptr %job, i64 %first, i64 %end)
  ret void
}}
{_ENTRY_HEAD}
  %alone = icmp sle i32 %threads, 1
  br i1 %alone, label %one, label %many
one:
  call void @strips(ptr %job, i64 0, i64 %n)
  ; behind
  ret void
many:
  %groups = sdiv i64 %n, {LANES}
  %count = sext i32 %threads to i64
  call void @{RUN}(ptr @share, ptr %job, i64 %groups, i64 %count)
  ; behind
  ret void
}}
"""
