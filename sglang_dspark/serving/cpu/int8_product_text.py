"""LLVM assembly of the int8 product's own parts (narrow_matmul_text.py has the rest).

A row of x becomes 16-bit integers with one scale, its largest number being 32767. Sixteen bits
times eight, 64 columns at a time, are summed exactly in 32-bit integers (`vpmaddwd`, or `vpdpwssd`
where the processor has it), and only this sum is a float32: with the weights' scale of the group it
goes into one chain of fused multiply-adds over ascending k. One conversion for 64 weights instead
of one for each is what makes the step as fast as its bytes are read.

A rounded row x is within max|x| / 65534 of itself in each place: over the row no further, in mean
square, than bfloat16 rounds, for rows of up to 16,384 columns. NaN or infinity makes its row NaN.
"""

from __future__ import annotations

import struct

from sglang_dspark.serving.cpu.weight_formats import SMALLEST_ROW

LANES = 16
PADDING = 32  # int16 behind a row: its scale, and whole cache lines
_FLOATS = f"<{LANES} x float>"
_INTS = f"<{LANES} x i32>"
_PAIRS = f"<{2 * LANES} x i16>"  # what one multiplication takes of x and of W
_SMALLEST = f"0x{struct.pack('>d', SMALLEST_ROW).hex()}"  # as LLVM writes a float32


def declarations(*, wide: bool) -> str:
    """Intrinsics, and `@madd`: products of 32 pairs, neighbours added, [16] int32."""
    return "\n".join((_DECLARATIONS, _MADD_WIDE if wide else _MADD_NARROW, _ROUND_ROWS))


def step(m: int, r: int) -> list[str]:
    """64 columns of r rows of W times m rows of x: `%t{p}_{q}_0` from `%t{p}_{q}_`."""
    lines: list[str] = []
    for half in range(2):
        lines.append(f"  %c{half} = add i64 %c, {half * 2 * LANES}")
        for p in range(r):
            at = f"{p}_{half}"
            lines += [
                f"  %pw{at} = getelementptr i8, ptr %w{p}, i64 %c{half}",
                f"  %b{at} = load <{2 * LANES} x i8>, ptr %pw{at}, align 1",
                f"  %vw{at} = sext <{2 * LANES} x i8> %b{at} to {_PAIRS}",
            ]
    for q in range(m):
        for half in range(2):
            lines += [
                f"  %px{q}_{half} = getelementptr i16, ptr %x{q}, i64 %c{half}",
                f"  %vx{q}_{half} = load {_PAIRS}, ptr %px{q}_{half}, align 2",
            ]
        for p in range(r):
            at = f"{p}_{q}"
            lines += [
                *(
                    f"  %i{half}_{at} = call {_INTS} @madd({_PAIRS} %vw{p}_{half}, "
                    f"{_PAIRS} %vx{q}_{half})"
                    for half in range(2)
                ),
                f"  %i_{at} = add {_INTS} %i0_{at}, %i1_{at}",
                f"  %f_{at} = sitofp {_INTS} %i_{at} to {_FLOATS}",
                f"  %t{at}_0 = call {_FLOATS} @llvm.fma.v{LANES}f32({_FLOATS} %f_{at}, "
                f"{_FLOATS} %vs{p}, {_FLOATS} %t{at}_)",
            ]
    return lines


def row_scales(m: int) -> list[str]:
    """`%rs{q}`: what a sum of a row of x is multiplied with."""
    return [
        line
        for q in range(m)
        for line in (
            f"  %prs{q} = getelementptr i16, ptr %x{q}, i64 %k",
            f"  %rs{q} = load float, ptr %prs{q}, align 4",
        )
    ]


ENTRY = f"""
  %ldr = add i64 %k, {PADDING}
  %room = mul i64 %m, %ldr
  %room.bytes = shl i64 %room, 1
  %rounded = call ptr @aligned_alloc(i64 64, i64 %room.bytes)
  call void @round_rows(ptr %x, i64 %ldx, i64 %m, i64 %k, ptr %rounded)
  store ptr %rounded, ptr %job
  store i64 %ldr, ptr %p1
"""
EXIT = "  call void @free(ptr %rounded)\n"

_DECLARATIONS = f"""
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare {_FLOATS} @llvm.fabs.v{LANES}f32({_FLOATS})
declare {_FLOATS} @llvm.maxnum.v{LANES}f32({_FLOATS}, {_FLOATS})
declare {_FLOATS} @llvm.rint.v{LANES}f32({_FLOATS})
declare {_INTS} @llvm.fptosi.sat.v{LANES}i32.v{LANES}f32({_FLOATS})
declare float @llvm.vector.reduce.fmax.v{LANES}f32({_FLOATS})
declare float @llvm.vector.reduce.fadd.v{LANES}f32(float, {_FLOATS})
"""
_MADD_WIDE = f"""
declare {_INTS} @llvm.x86.avx512.pmaddw.d.512({_PAIRS}, {_PAIRS})
define private {_INTS} @madd({_PAIRS} %a, {_PAIRS} %b) #1 {{
  %sums = call {_INTS} @llvm.x86.avx512.pmaddw.d.512({_PAIRS} %a, {_PAIRS} %b)
  ret {_INTS} %sums
}}
"""
_LOW, _HIGH = (
    f"<16 x i32> <{', '.join(f'i32 {lane}' for lane in range(start, start + 16))}>"
    for start in (0, 16)
)
_BOTH = f"<16 x i32> <{', '.join(f'i32 {lane}' for lane in range(16))}>"
_MADD_NARROW = f"""
declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)
define private {_INTS} @madd({_PAIRS} %a, {_PAIRS} %b) #1 {{
  %al = shufflevector {_PAIRS} %a, {_PAIRS} poison, {_LOW}
  %ah = shufflevector {_PAIRS} %a, {_PAIRS} poison, {_HIGH}
  %bl = shufflevector {_PAIRS} %b, {_PAIRS} poison, {_LOW}
  %bh = shufflevector {_PAIRS} %b, {_PAIRS} poison, {_HIGH}
  %l = call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> %al, <16 x i16> %bl)
  %h = call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> %ah, <16 x i16> %bh)
  %sums = shufflevector <8 x i32> %l, <8 x i32> %h, {_BOTH}
  ret {_INTS} %sums
}}
"""
# Rows of x, [m, k] float32, as int16 with their scales behind them. A product of a row with 0 is 0
# where all is finite, else NaN, which the scale takes on.
_ROUND_ROWS = f"""
define private void @round_rows(ptr %x, i64 %ldx, i64 %m, i64 %k, ptr %out) #0 {{
entry:
  %ldo = add i64 %k, {PADDING}
  br label %row
row:
  %j = phi i64 [ 0, %entry ], [ %j.next, %row.end ]
  %xo = mul i64 %j, %ldx
  %xj = getelementptr float, ptr %x, i64 %xo
  %oo = mul i64 %j, %ldo
  %oj = getelementptr i16, ptr %out, i64 %oo
  br label %largest
largest:
  %c = phi i64 [ 0, %row ], [ %c.next, %largest ]
  %most = phi {_FLOATS} [ zeroinitializer, %row ], [ %most.next, %largest ]
  %lost = phi {_FLOATS} [ zeroinitializer, %row ], [ %lost.next, %largest ]
  %px = getelementptr float, ptr %xj, i64 %c
  %v = load {_FLOATS}, ptr %px, align 4
  %size = call {_FLOATS} @llvm.fabs.v{LANES}f32({_FLOATS} %v)
  %most.next = call {_FLOATS} @llvm.maxnum.v{LANES}f32({_FLOATS} %size, {_FLOATS} %most)
  %nought = fmul {_FLOATS} %v, zeroinitializer
  %lost.next = fadd {_FLOATS} %lost, %nought
  %c.next = add i64 %c, {LANES}
  %c.more = icmp slt i64 %c.next, %k
  br i1 %c.more, label %largest, label %scale
scale:
  %top = call float @llvm.vector.reduce.fmax.v{LANES}f32({_FLOATS} %most.next)
  %bad = call float @llvm.vector.reduce.fadd.v{LANES}f32(float 0.0, {_FLOATS} %lost.next)
  %seen = fcmp ogt float %top, {_SMALLEST}
  %inverse = fdiv float 32767.0, %top
  %factor = select i1 %seen, float %inverse, float 0.0
  %each = fdiv float %top, 32767.0
  %given = select i1 %seen, float %each, float 0.0
  %kept = fadd float %given, %bad
  %pk = getelementptr i16, ptr %oj, i64 %k
  store float %kept, ptr %pk, align 4
  %fi = insertelement {_FLOATS} poison, float %factor, i32 0
  %factors = shufflevector {_FLOATS} %fi, {_FLOATS} poison, {_INTS} zeroinitializer
  br label %round
round:
  %d = phi i64 [ 0, %scale ], [ %d.next, %round ]
  %py = getelementptr float, ptr %xj, i64 %d
  %y = load {_FLOATS}, ptr %py, align 4
  %scaled = fmul {_FLOATS} %y, %factors
  %whole = call {_FLOATS} @llvm.rint.v{LANES}f32({_FLOATS} %scaled)
  %ints = call {_INTS} @llvm.fptosi.sat.v{LANES}i32.v{LANES}f32({_FLOATS} %whole)
  %shorts = trunc {_INTS} %ints to <{LANES} x i16>
  %po = getelementptr i16, ptr %oj, i64 %d
  store <{LANES} x i16> %shorts, ptr %po, align 2
  %d.next = add i64 %d, {LANES}
  %d.more = icmp slt i64 %d.next, %k
  br i1 %d.more, label %round, label %row.end
row.end:
  %j.next = add i64 %j, 1
  %j.more = icmp slt i64 %j.next, %m
  br i1 %j.more, label %row, label %exit
exit:
  ret void
}}
"""
