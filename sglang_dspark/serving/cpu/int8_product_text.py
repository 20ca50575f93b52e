"""LLVM assembly of the int8 product's own parts (narrow_matmul_text.py has the rest).

A row of x becomes 16-bit integers with one scale, its largest number being 32767. A vector holds
the sums of neighbouring rows of W, whose pairs of columns lie side by side in a panel
(weight_formats.py): sixteen bits times eight, both products of a pair added at once (`vpmaddwd`, or
`vpdpwssd` where the processor has it). The 64 columns of a group are summed exactly, in 32-bit
integers, and only their sum is a float32: with the weights' scales of the group it goes into one
chain of fused multiply-adds over ascending k. No sum is left to be made across a vector.

A rounded row x is within max|x| / 65534 of itself in each place: over the row no further, in mean
square, than bfloat16 rounds, for rows of up to 16,384 columns. NaN or infinity makes its row NaN.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from sglang_dspark.serving.cpu.weight_formats import (
    GROUP,
    GROUP_BYTES,
    PANEL,
    SCALES_BYTES,
    SMALLEST_ROW,
)

LANES = 16
PADDING = 32  # int16 behind a row: its scale, and whole cache lines
_FLOATS = f"<{LANES} x float>"
_INTS = f"<{LANES} x i32>"
SMALLEST = f"0x{struct.pack('>d', SMALLEST_ROW).hex()}"  # as LLVM writes a float32

_LINE = 64
# Where a vector is a whole panel, two are taken together from so many rows of x on: each pair of x
# is loaded once for both. Bytes are fetched so far ahead, into the second-level cache; but one row
# against whole panels reads as fast as bytes come by themselves.
_TOGETHER = 3
_AHEAD = 32768


def declarations(*, wide: bool) -> str:
    """Intrinsics, and `@madd`: products of pairs, both of a pair added, int32."""
    lanes = _lanes(wide)
    name = "avx512.pmaddw.d.512" if wide else "avx2.pmadd.wd"
    pairs, ints = f"<{2 * lanes} x i16>", f"<{lanes} x i32>"
    madd = [
        f"declare {ints} @llvm.x86.{name}({pairs}, {pairs})",
        f"define private {ints} @madd({pairs} %a, {pairs} %b) #1 {{",
        f"  %sums = call {ints} @llvm.x86.{name}({pairs} %a, {pairs} %b)",
        f"  ret {ints} %sums",
        "}",
    ]
    narrow = (
        "" if wide else "declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)"
    )
    return "\n".join((_DECLARATIONS, narrow, *madd, _ROUND_ROWS))


def block_kernel(m: int, *, wide: bool) -> str:
    """`block<m>`: m rows of x, rounded, against n rows of W (16 divides n)."""
    kernel = PanelKernel(m, _lanes(wide))
    return in_pairs(kernel, m) if wide else kernel.text(f"block{m}", 1, None)


def in_pairs(kernel: PanelKernel, m: int) -> str:
    """`block<m>` of a kernel whose vectors are whole panels."""
    if m < _TOGETHER:
        return kernel.text(f"block{m}", 1, None)
    last = f"block{m}_last"
    return kernel.text(last, 1, None) + "\n" + kernel.text(f"block{m}", 2, last)


def _lanes(wide: bool) -> int:
    """Rows of W in a vector: a panel, or half of one."""
    return PANEL if wide else PANEL // 2


@dataclass(frozen=True)
class PanelKernel:
    """m rows of x against `lanes` rows of W in each vector."""

    m: int
    lanes: int

    @property
    def floats(self) -> str:
        return f"<{self.lanes} x float>"

    @property
    def ints(self) -> str:
        return f"<{self.lanes} x i32>"

    @property
    def pairs(self) -> str:
        return f"<{2 * self.lanes} x i16>"

    def text(self, name: str, panels: int, rest: str | None) -> str:
        """The function `name`, panels at a time; `rest` is the one that takes what is left."""
        step = self.lanes * panels
        lines = [
            f"define private void @{name}(ptr noalias %x, i64 %ldx, ptr noalias %w, i64 %k, "
            "ptr noalias %out, i64 %ldo, i64 %n) #0 {",
            "entry:",
            *self._rows_of_x(),
            f"  %groups = sdiv i64 %k, {GROUP}",
            f"  %panel = mul i64 %groups, {GROUP_BYTES}",
            f"  %over = srem i64 %n, {step}",
            "  %end = sub i64 %n, %over",
            "  %some = icmp sgt i64 %end, 0",
            "  br i1 %some, label %rows, label %left",
            "rows:",
            "  %i = phi i64 [ 0, %entry ], [ %i.next, %store ]",
            *_panels_at(panels),
            "  br label %group",
            *self._group(panels),
            *self._store(panels),
            f"  %i.next = add i64 %i, {step}",
            "  %more = icmp slt i64 %i.next, %end",
            "  br i1 %more, label %rows, label %left",
            "left:",
            *([] if rest is None else _REST.format(rest=rest).strip("\n").split("\n")),
            "  ret void",
            "}",
        ]
        return "\n".join(lines)

    def _rows_of_x(self) -> list[str]:
        """`%x{q}` and `%rs{q}`, what the sums of a row of x are multiplied with."""
        return [
            line
            for q in range(self.m)
            for line in (
                f"  %xo{q} = mul i64 %ldx, {q}",
                f"  %x{q} = getelementptr i16, ptr %x, i64 %xo{q}",
                f"  %prs{q} = getelementptr i16, ptr %x{q}, i64 %k",
                f"  %rs{q} = load float, ptr %prs{q}, align 4",
                f"  %ri{q} = insertelement {self.floats} poison, float %rs{q}, i32 0",
                f"  %rv{q} = shufflevector {self.floats} %ri{q}, {self.floats} poison, "
                f"{self.ints} zeroinitializer",
            )
        ]

    def _group(self, panels: int) -> list[str]:
        """64 columns of W's rows times m rows of x: `%t{p}_{q}.next` from `%t{p}_{q}`."""
        each = [(p, q) for p in range(panels) for q in range(self.m)]
        lines = [
            "group:",
            "  %g = phi i64 [ 0, %rows ], [ %g.next, %group ]",
            *(
                f"  %t{p}_{q} = phi {self.floats} [ zeroinitializer, %rows ], "
                f"[ %t{p}_{q}.next, %group ]"
                for p, q in each
            ),
            f"  %g.bytes = mul i64 %g, {GROUP_BYTES}",
            f"  %g.columns = mul i64 %g, {GROUP}",
        ]
        for p in range(panels):
            lines += [
                f"  %wg{p} = getelementptr i8, ptr %w{p}, i64 %g.bytes",
                f"  %ps{p} = getelementptr i8, ptr %wg{p}, i64 %at.scale",
                f"  %s{p} = load {self.floats}, ptr %ps{p}, align 4",
                f"  %wl{p} = getelementptr i8, ptr %wg{p}, i64 %at.pair",
            ]
        lines += self._group_of_x()
        for place in range(self.places):
            lines += self._place(place, panels)
        for p, q in each:
            lines += self._into_chain(p, q)
        return [
            *lines,
            "  %g.next = add i64 %g, 1",
            "  %g.more = icmp slt i64 %g.next, %groups",
            "  br i1 %g.more, label %group, label %store",
        ]

    @property
    def places(self) -> int:
        """Neighbouring columns that are multiplied at once, in a group."""
        return GROUP // 2

    def _group_of_x(self) -> list[str]:
        """`%xg{q}`, a group's columns of a row of x."""
        return [f"  %xg{q} = getelementptr i16, ptr %x{q}, i64 %g.columns" for q in range(self.m)]

    def _place(self, c: int, panels: int) -> list[str]:
        """A pair of columns: the exact sum `%i{p}_{q}_{c}` from that of the pairs before."""
        lines = []
        for p in range(panels):
            lines += [
                *(() if self.lanes * panels == PANEL else self._fetch(c, p)),
                f"  %pw{p}_{c} = getelementptr i8, ptr %wl{p}, i64 {SCALES_BYTES + 2 * PANEL * c}",
                f"  %b{p}_{c} = load <{2 * self.lanes} x i8>, ptr %pw{p}_{c}, align 1",
                f"  %v{p}_{c} = sext <{2 * self.lanes} x i8> %b{p}_{c} to {self.pairs}",
            ]
        for q in range(self.m):
            lines += [
                f"  %px{q}_{c} = getelementptr i16, ptr %xg{q}, i64 {2 * c}",
                f"  %xi{q}_{c} = load i32, ptr %px{q}_{c}, align 4",
                f"  %xs{q}_{c} = insertelement {self.ints} poison, i32 %xi{q}_{c}, i32 0",
                f"  %xv{q}_{c} = shufflevector {self.ints} %xs{q}_{c}, {self.ints} poison, "
                f"{self.ints} zeroinitializer",
                f"  %xp{q}_{c} = bitcast {self.ints} %xv{q}_{c} to {self.pairs}",
            ]
            for p in range(panels):
                at = f"{p}_{q}_{c}"
                before = f"%i{p}_{q}_{c - 1}" if c else "zeroinitializer"
                lines += [
                    f"  %m{at} = call {self.ints} @madd({self.pairs} %v{p}_{c}, "
                    f"{self.pairs} %xp{q}_{c})",
                    f"  %i{at} = add {self.ints} {before}, %m{at}",
                ]
        return lines

    def _fetch(self, c: int, p: int) -> list[str]:
        """Each cache line of the group that comes in a while, spread over its places."""
        lines = GROUP_BYTES // _LINE
        wanted = [n for n in range(lines) if n * self.places // lines == c]
        return [
            part
            for line in wanted
            for part in (
                f"  %pf{p}_{line} = getelementptr i8, ptr %wg{p}, i64 {_AHEAD + line * _LINE}",
                f"  call void @llvm.prefetch.p0(ptr %pf{p}_{line}, i32 0, i32 2, i32 1)",
            )
        ]

    def _into_chain(self, p: int, q: int) -> list[str]:
        """The exact sum of a group times its scales, onto what the groups before came to."""
        at = f"{p}_{q}"
        return [
            f"  %f{at} = sitofp {self.ints} %i{at}_{self.places - 1} to {self.floats}",
            f"  %t{at}.next = call {self.floats} @llvm.fma.v{self.lanes}f32({self.floats} %f{at}, "
            f"{self.floats} %s{p}, {self.floats} %t{at})",
        ]

    def _result(self, p: int, q: int) -> tuple[list[str], str]:
        """The chain times the scale of x's row: how it comes, and its name."""
        return [f"  %e{p}_{q} = fmul {self.floats} %t{p}_{q}.next, %rv{q}"], f"%e{p}_{q}"

    def _store(self, panels: int) -> list[str]:
        """Results to their places."""
        lines = ["store:"]
        for q in range(self.m):
            lines.append(f"  %oj{q} = mul i64 %ldo, {q}")
            for p in range(panels):
                at = f"{p}_{q}"
                before, result = self._result(p, q)
                lines += [
                    *before,
                    f"  %oc{at} = add i64 %i, {p * PANEL}",
                    f"  %oi{at} = add i64 %oj{q}, %oc{at}",
                    f"  %po{at} = getelementptr float, ptr %out, i64 %oi{at}",
                    f"  store {self.floats} {result}, ptr %po{at}, align 4",
                ]
        return lines


def _panels_at(panels: int) -> list[str]:
    """`%w{p}`, the panels that row `%i` is in the first of, and where its pairs and scales lie."""
    lines = [
        f"  %start = sdiv i64 %i, {PANEL}",
        f"  %lane = srem i64 %i, {PANEL}",
        "  %at.pair = shl i64 %lane, 1",
        "  %at.scale = shl i64 %lane, 2",
    ]
    for p in range(panels):
        lines += [
            f"  %n{p} = add i64 %start, {p}",
            f"  %o{p} = mul i64 %n{p}, %panel",
            f"  %w{p} = getelementptr i8, ptr %w, i64 %o{p}",
        ]
    return lines


_REST = f"""
  %any = icmp slt i64 %end, %n
  br i1 %any, label %rest, label %exit
rest:
  %start.r = sdiv i64 %end, {PANEL}
  %o.r = mul i64 %start.r, %panel
  %w.r = getelementptr i8, ptr %w, i64 %o.r
  %out.r = getelementptr float, ptr %out, i64 %end
  %n.r = sub i64 %n, %end
  call void @{{rest}}(ptr %x, i64 %ldx, ptr %w.r, i64 %k, ptr %out.r, i64 %ldo, i64 %n.r)
  br label %exit
exit:
"""
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
  %seen = fcmp ogt float %top, {SMALLEST}
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
