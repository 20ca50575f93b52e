"""LLVM assembly of the product of int8 weights with activations of eight bits.

As int8_product_text.py, with four columns where that has two: `vpdpbusd` adds four products of
bytes onto each of 16 sums, twice the work of 16-bit integers. It takes one factor without a sign:
weights lie 128 above what they stand for (`BYTES` in weight_formats.py), and -128 times the sum of
a group of x, known when the group is rounded, is where its sums begin. So they are exact too.

The 64 columns of x that a group of weights meets have a scale of their own, their largest number
being 127. NaN or infinity makes its row NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.binding as llvm  # type: ignore[import-untyped]

from sglang_dspark.serving.cpu.int8_product_text import SMALLEST, PanelKernel, in_pairs
from sglang_dspark.serving.cpu.weight_formats import GROUP, PANEL, SCALES_BYTES

LANES = 16
_SIDE_BY_SIDE = 4  # columns
_LINE = 64
_FLOATS = f"<{LANES} x float>"
_INTS = f"<{LANES} x i32>"
# What LLVM takes the bytes of the instruction for.
_BYTES = f"<{4 * LANES} x i8>" if llvm.llvm_version_info >= (22, 0, 0) else _INTS
_DOT = "@llvm.x86.avx512.vpdpbusd.512"


def block_kernel(m: int) -> str:
    """`block<m>`: m rows of x, rounded, against n rows of W (16 divides n)."""
    return in_pairs(_ByteKernel(m, LANES), m)


@dataclass(frozen=True)
class _ByteKernel(PanelKernel):
    """A row of x is its bytes, a float32 scale for each group, and what its sums begin with."""

    @property
    def places(self) -> int:
        return GROUP // _SIDE_BY_SIDE

    def _rows_of_x(self) -> list[str]:
        lines = [f"  %x.groups = sdiv i64 %k, {GROUP}", "  %x.scales = shl i64 %x.groups, 2"]
        for q in range(self.m):
            lines += [
                f"  %xo{q} = mul i64 %ldx, {q}",
                f"  %x{q} = getelementptr i8, ptr %x, i64 %xo{q}",
                f"  %sx{q} = getelementptr i8, ptr %x{q}, i64 %k",
                f"  %cx{q} = getelementptr i8, ptr %sx{q}, i64 %x.scales",
            ]
        return lines

    def _group_of_x(self) -> list[str]:
        """`%xg{q}`, its scale `%xs{q}` and first sum `%xc{q}`, in every lane."""
        lines = []
        for q in range(self.m):
            lines.append(f"  %xg{q} = getelementptr i8, ptr %x{q}, i64 %g.columns")
            for name, source, kind, vector in (
                ("xs", "sx", "float", _FLOATS),
                ("xc", "cx", "i32", _INTS),
            ):
                lines += [
                    f"  %p{name}{q} = getelementptr {kind}, ptr %{source}{q}, i64 %g",
                    f"  %l{name}{q} = load {kind}, ptr %p{name}{q}, align 4",
                    f"  %i{name}{q} = insertelement {vector} poison, {kind} %l{name}{q}, i32 0",
                    f"  %{name}{q} = shufflevector {vector} %i{name}{q}, {vector} poison, "
                    f"{_INTS} zeroinitializer",
                ]
        return lines

    def _place(self, c: int, panels: int) -> list[str]:
        """Four columns: the exact sum `%i{p}_{q}_{c}` from that of those before."""
        lines = []
        for p in range(panels):
            lines += [
                *(() if panels == 1 else self._fetch(c, p)),
                f"  %pw{p}_{c} = getelementptr i8, ptr %wl{p}, i64 {SCALES_BYTES + 4 * PANEL * c}",
                f"  %v{p}_{c} = load {_BYTES}, ptr %pw{p}_{c}, align 1",
            ]
        for q in range(self.m):
            lines += [
                f"  %px{q}_{c} = getelementptr i8, ptr %xg{q}, i64 {_SIDE_BY_SIDE * c}",
                f"  %xi{q}_{c} = load i32, ptr %px{q}_{c}, align 4",
                f"  %xn{q}_{c} = insertelement {_INTS} poison, i32 %xi{q}_{c}, i32 0",
                f"  %xv{q}_{c} = shufflevector {_INTS} %xn{q}_{c}, {_INTS} poison, "
                f"{_INTS} zeroinitializer",
                f"  %xp{q}_{c} = bitcast {_INTS} %xv{q}_{c} to {_BYTES}",
            ]
            for p in range(panels):
                before = f"%i{p}_{q}_{c - 1}" if c else f"%xc{q}"
                lines.append(
                    f"  %i{p}_{q}_{c} = call {_INTS} {_DOT}({_INTS} {before}, "
                    f"{_BYTES} %v{p}_{c}, {_BYTES} %xp{q}_{c})"
                )
        return lines

    def _into_chain(self, p: int, q: int) -> list[str]:
        """The exact sum of a group times both scales, onto what the groups before came to."""
        at = f"{p}_{q}"
        return [
            f"  %f{at} = sitofp {_INTS} %i{at}_{self.places - 1} to {_FLOATS}",
            f"  %z{at} = fmul {_FLOATS} %s{p}, %xs{q}",
            f"  %t{at}.next = call {_FLOATS} @llvm.fma.v{LANES}f32({_FLOATS} %f{at}, "
            f"{_FLOATS} %z{at}, {_FLOATS} %t{at})",
        ]

    def _result(self, p: int, q: int) -> tuple[list[str], str]:
        return [], f"%t{p}_{q}.next"  # the scales of x are in the chain


# A row takes k bytes and eight more for each group; whole cache lines, and one between two rows.
ENTRY = f"""
  %x.groups = sdiv i64 %k, {GROUP}
  %x.extra = shl i64 %x.groups, 3
  %x.size = add i64 %k, %x.extra
  %x.over = add i64 %x.size, {2 * _LINE - 1}
  %ldr = and i64 %x.over, -{_LINE}
  %room.bytes = mul i64 %m, %ldr
  %rounded = call ptr @aligned_alloc(i64 {_LINE}, i64 %room.bytes)
  call void @round_rows(ptr %x, i64 %ldx, i64 %m, i64 %k, ptr %rounded, i64 %ldr)
  store ptr %rounded, ptr %job
  store i64 %ldr, ptr %p1
"""
_WIDE = f"<{GROUP} x float>"
_WHOLE = f"<{GROUP} x i32>"
_NAME = f"v{GROUP}f32"
# Rows of x, [m, k] float32, group by group. A product of a group with 0 is 0 where all is finite,
# else NaN, which the scale takes on.
DECLARATIONS = f"""
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare {_INTS} {_DOT}({_INTS}, {_BYTES}, {_BYTES})
declare {_WIDE} @llvm.fabs.{_NAME}({_WIDE})
declare {_WIDE} @llvm.rint.{_NAME}({_WIDE})
declare {_WHOLE} @llvm.fptosi.sat.v{GROUP}i32.{_NAME}({_WIDE})
declare float @llvm.vector.reduce.fmax.{_NAME}({_WIDE})
declare float @llvm.vector.reduce.fadd.{_NAME}(float, {_WIDE})
declare i32 @llvm.vector.reduce.add.v{GROUP}i32({_WHOLE})
define private void @round_rows(ptr %x, i64 %ldx, i64 %m, i64 %k, ptr %out, i64 %ldo) #0 {{
entry:
  %groups = sdiv i64 %k, {GROUP}
  %scales.bytes = shl i64 %groups, 2
  br label %row
row:
  %j = phi i64 [ 0, %entry ], [ %j.next, %row.end ]
  %xo = mul i64 %j, %ldx
  %xj = getelementptr float, ptr %x, i64 %xo
  %oo = mul i64 %j, %ldo
  %oj = getelementptr i8, ptr %out, i64 %oo
  %scales = getelementptr i8, ptr %oj, i64 %k
  %firsts = getelementptr i8, ptr %scales, i64 %scales.bytes
  br label %group
group:
  %g = phi i64 [ 0, %row ], [ %g.next, %group ]
  %c = mul i64 %g, {GROUP}
  %px = getelementptr float, ptr %xj, i64 %c
  %v = load {_WIDE}, ptr %px, align 4
  %size = call {_WIDE} @llvm.fabs.{_NAME}({_WIDE} %v)
  %top = call nnan float @llvm.vector.reduce.fmax.{_NAME}({_WIDE} %size)
  %nought = fmul {_WIDE} %v, zeroinitializer
  %bad = call reassoc float @llvm.vector.reduce.fadd.{_NAME}(float 0.0, {_WIDE} %nought)
  %seen = fcmp ogt float %top, {SMALLEST}
  %inverse = fdiv float 127.0, %top
  %factor = select i1 %seen, float %inverse, float 0.0
  %each = fdiv float %top, 127.0
  %given = select i1 %seen, float %each, float 0.0
  %kept = fadd float %given, %bad
  %ps = getelementptr float, ptr %scales, i64 %g
  store float %kept, ptr %ps, align 4
  %fi = insertelement {_WIDE} poison, float %factor, i32 0
  %factors = shufflevector {_WIDE} %fi, {_WIDE} poison, {_WHOLE} zeroinitializer
  %scaled = fmul {_WIDE} %v, %factors
  %near = call {_WIDE} @llvm.rint.{_NAME}({_WIDE} %scaled)
  %ints = call {_WHOLE} @llvm.fptosi.sat.v{GROUP}i32.{_NAME}({_WIDE} %near)
  %bytes = trunc {_WHOLE} %ints to <{GROUP} x i8>
  %po = getelementptr i8, ptr %oj, i64 %c
  store <{GROUP} x i8> %bytes, ptr %po, align 1
  %sum = call i32 @llvm.vector.reduce.add.v{GROUP}i32({_WHOLE} %ints)
  %first = mul i32 %sum, -128
  %pc = getelementptr i32, ptr %firsts, i64 %g
  store i32 %first, ptr %pc, align 4
  %g.next = add i64 %g, 1
  %g.more = icmp slt i64 %g.next, %groups
  br i1 %g.more, label %group, label %row.end
row.end:
  %j.next = add i64 %j, 1
  %j.more = icmp slt i64 %j.next, %m
  br i1 %j.more, label %row, label %exit
exit:
  ret void
}}
"""
