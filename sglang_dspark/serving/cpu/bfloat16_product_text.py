"""LLVM assembly of bfloat16 rows times a bfloat16 W (narrow_matmul_text.py has the rest).

`vdpbf16ps` adds two products of bfloat16 numbers onto each of 16 float32 sums, twice the work of a
float32 multiplication. A row of x is rounded to bfloat16 once, to the nearest, ties to even, as a
server that computes in bfloat16 rounds it; sums stay float32. A sum is one chain of these over
ascending pairs of columns, whatever rows share the product. Subnormal numbers count as 0.
"""

from __future__ import annotations

from sglang_dspark.serving.cpu import int8_product_text as int8
from sglang_dspark.serving.cpu.weight_formats import BFLOAT16

LANES = 16
# Most rows of x taken together, so that all are multiplied while W comes from memory; as many as
# the first-level cache holds beside it, but six in any case.
_BLOCK_ROWS, _BLOCK_NUMBERS, _LEAST_ROWS = 12, 12288, 6
# x rows in a block -> rows of W taken together: 24 sums at most beside the operands.
W_ROWS = {m: 4 if m <= 6 else 2 for m in range(1, _BLOCK_ROWS + 1)}
_FLOATS = f"<{LANES} x float>"
_PAIRS = f"<{BFLOAT16.columns} x bfloat>"
_DOT = "@llvm.x86.avx512bf16.dpbf16ps.512"


def step(m: int, r: int) -> list[str]:
    """`%t{p}_{q}.next` from `%t{p}_{q}`: 32 columns of r rows of W times m rows of x."""
    lines = []
    for p in range(r):
        lines += [
            f"  %pw{p} = getelementptr bfloat, ptr %w{p}, i64 %c",
            f"  %vw{p} = load {_PAIRS}, ptr %pw{p}, align 2",
        ]
    for q in range(m):
        lines += [
            f"  %px{q} = getelementptr bfloat, ptr %x{q}, i64 %c",
            f"  %vx{q} = load {_PAIRS}, ptr %px{q}, align 2",
        ]
        lines += [
            f"  %t{p}_{q}.next = call {_FLOATS} {_DOT}({_FLOATS} %t{p}_{q}, {_PAIRS} %vw{p}, "
            f"{_PAIRS} %vx{q})"
            for p in range(r)
        ]
    return lines


# Rows have room as sixteen-bit integers do, the padding included, without which rows of 4 KiB would
# share cache sets.
ENTRY = f"""{int8.ENTRY}
  %held = sdiv i64 {_BLOCK_NUMBERS}, %k
  %some = call i64 @llvm.smax.i64(i64 %held, i64 {_LEAST_ROWS})
  %most = call i64 @llvm.smin.i64(i64 %some, i64 {_BLOCK_ROWS})
  %over = add i64 %m, %most
  %last = sub i64 %over, 1
  %parts = sdiv i64 %last, %most
  %shared = add i64 %m, %parts
  %more = sub i64 %shared, 1
  %together = sdiv i64 %more, %parts
  store i64 %together, ptr %p3
"""
EXIT = int8.EXIT

# Rows of x, [m, k] float32, as bfloat16.
DECLARATIONS = f"""
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare i64 @llvm.smax.i64(i64, i64)
declare {_FLOATS} {_DOT}({_FLOATS}, {_PAIRS}, {_PAIRS})
define private void @round_rows(ptr %x, i64 %ldx, i64 %m, i64 %k, ptr %out) #0 {{
entry:
  %ldo = add i64 %k, {int8.PADDING}
  br label %row
row:
  %j = phi i64 [ 0, %entry ], [ %j.next, %row.end ]
  %xo = mul i64 %j, %ldx
  %xj = getelementptr float, ptr %x, i64 %xo
  %oo = mul i64 %j, %ldo
  %oj = getelementptr bfloat, ptr %out, i64 %oo
  br label %round
round:
  %c = phi i64 [ 0, %row ], [ %c.next, %round ]
  %px = getelementptr float, ptr %xj, i64 %c
  %v = load {_FLOATS}, ptr %px, align 4
  %h = fptrunc {_FLOATS} %v to <{LANES} x bfloat>
  %po = getelementptr bfloat, ptr %oj, i64 %c
  store <{LANES} x bfloat> %h, ptr %po, align 2
  %c.next = add i64 %c, {LANES}
  %c.more = icmp slt i64 %c.next, %k
  br i1 %c.more, label %round, label %row.end
row.end:
  %j.next = add i64 %j, 1
  %j.more = icmp slt i64 %j.next, %m
  br i1 %j.more, label %row, label %exit
exit:
  ret void
}}
"""
