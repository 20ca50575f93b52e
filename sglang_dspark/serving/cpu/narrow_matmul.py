"""Machine code for out = x W^T with few rows of x, float32, straight from the weights as loaded.

A decode step is bound by reading W once; a verify step of 6 rows should cost about the same, but
BLAS libraries repack or re-read W for so few rows. Here each W row meets all rows of x while it is
in registers, and the rows to come are prefetched. W stays in its [N, K] layout: no second copy.

Every output element is one chain of 16-lane fused multiply-adds over ascending k, then one fixed
pairwise sum of the lanes. The blocking changes with the row count, that order does not: a row's
result is bit-identical whatever rows share the product, so a verified token and a decoded token
see the same arithmetic.

The LLVM assembly is written here and compiled by llvmlite (Numba's back end, without Numba): the
blocking needs control over registers that Numba's vectoriser does not give.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]

LANES = 16
MAX_BLOCK_ROWS = 6
_STRIP = 64  # rows of W kept in the second-level cache while further rows of x pass over them
_VECTOR = f"<{LANES} x float>"
_MASK = f"<{LANES} x i32>"

# x rows in a block -> rows of W taken together (each divides LANES). 16 vector registers of 8
# floats hold 6 accumulators of 16 lanes beside the operands, 32 registers of 16 floats hold 24.
_W_ROWS_NARROW = {1: 4, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1}
_W_ROWS_WIDE = dict.fromkeys(range(1, MAX_BLOCK_ROWS + 1), 4)


@dataclass(frozen=True)
class NarrowMatmul:
    """Compiled product; `call(x, row_stride, rows, block, W, N, K, out, threads)`.

    x, W and out are addresses; row_stride is in floats; block <= MAX_BLOCK_ROWS rows of x are taken
    together; N and K are multiples of LANES; out is [rows, N] without gaps.
    entry: address of the same function, for compiled callers.
    threads_available: False where no OpenMP runtime was found; `threads` must then be 1.
    """

    call: Callable[[int, int, int, int, int, int, int, int, int], None]
    entry: int
    threads_available: bool
    _keep: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True)
class Processor:
    """What to compile for: LLVM's CPU name and feature string."""

    name: str
    features: str

    @classmethod
    def host(cls) -> Processor:
        return cls(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())

    @property
    def wide(self) -> bool:
        """Whether it has 32 registers of 16 floats."""
        return "+avx512f" in self.features.split(",")

    @property
    def fuses(self) -> bool:
        """Whether it multiplies and adds in one instruction, without which the code would crawl."""
        triple = llvm.get_process_triple()
        if triple.startswith(("x86_64", "amd64")):
            return {"+fma", "+avx2"} <= set(self.features.split(","))
        return triple.startswith(("aarch64", "arm64"))


AVX2 = Processor("haswell", "+avx2,+fma")


def compile_matmul(processor: Processor, gomp: Path | None) -> NarrowMatmul:
    """Compile for `processor`; gomp: the libgomp that torch uses, whose threads are shared.

    Raises RuntimeError when LLVM rejects the assembly or the target (a fault of this file).
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    threaded = gomp is not None and _link_openmp(gomp)
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=processor.name, features=processor.features, opt=3
    )
    module = llvm.parse_assembly(assembly(wide=processor.wide, threaded=threaded))
    module.triple = llvm.get_process_triple()
    module.data_layout = str(target.target_data)
    module.verify()
    builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    address, size = ctypes.c_void_p, ctypes.c_int64
    kind = ctypes.CFUNCTYPE(
        None, address, size, size, size, address, size, size, address, ctypes.c_int32
    )
    entry = engine.get_function_address("narrow_matmul")
    return NarrowMatmul(kind(entry), entry, threads_available=threaded, _keep=(engine, target))


def _link_openmp(gomp: Path) -> bool:
    """Make the OpenMP entry points known to LLVM; False when the library lacks one."""
    library = ctypes.CDLL(str(gomp))
    addresses = {}
    for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
        if not hasattr(library, name):
            return False
        addresses[name] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    for name, value in addresses.items():
        llvm.add_symbol(name, value)
    return True


def assembly(*, wide: bool, threaded: bool) -> str:
    """The module as LLVM assembly text."""
    w_rows = _W_ROWS_WIDE if wide else _W_ROWS_NARROW
    width = "512" if wide else "256"
    blocks = range(1, MAX_BLOCK_ROWS + 1)
    parts = [_block_kernel(m, w_rows[m]) for m in blocks]
    table = ", ".join(f"ptr @block{m}" for m in blocks)
    parts.append(f"@blocks = private constant [{MAX_BLOCK_ROWS} x ptr] [{table}]")
    parts.append(_STRIPS)
    parts.append(_ENTRY_THREADED if threaded else _ENTRY_SINGLE)
    parts.append(f"declare {_VECTOR} @llvm.fma.v{LANES}f32({_VECTOR}, {_VECTOR}, {_VECTOR})")
    parts.append("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
    parts.append("declare i64 @llvm.smin.i64(i64, i64)")
    parts.append(f'attributes #0 = {{ nounwind "prefer-vector-width"="{width}" }}')
    return "\n".join(parts)


def _block_kernel(m: int, r: int) -> str:
    """`block<m>`: m rows of x against n rows of W, r at a time (r divides n)."""
    a = range(r)
    j = range(m)
    lines = [
        f"define private void @block{m}(ptr noalias %x, i64 %ldx, ptr noalias %w, i64 %k, "
        "ptr noalias %out, i64 %ldo, i64 %n) #0 {",
        "entry:",
        *(f"  %xo{q} = mul i64 %ldx, {q}" for q in j),
        *(f"  %x{q} = getelementptr float, ptr %x, i64 %xo{q}" for q in j),
        # Rows to come that fit in the first-level cache beside the current ones.
        f"  %ahead = mul i64 %k, {4 * max(2, r)}",
        "  br label %rows",
        "rows:",
        "  %i = phi i64 [ 0, %entry ], [ %i.next, %reduce ]",
        *(f"  %i{p} = add i64 %i, {p}" for p in a),
        *(f"  %wo{p} = mul i64 %i{p}, %k" for p in a),
        *(f"  %w{p} = getelementptr float, ptr %w, i64 %wo{p}" for p in a),
        "  br label %dot",
        "dot:",
        "  %c = phi i64 [ 0, %rows ], [ %c.next, %dot ]",
    ]
    for p in a:
        for q in j:
            lines.append(
                f"  %s{p}_{q} = phi {_VECTOR} [ zeroinitializer, %rows ], [ %t{p}_{q}, %dot ]"
            )
    lines += _dot_body(m, r)
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


def _dot_body(m: int, r: int) -> list[str]:
    """One step over k: LANES columns of r rows of W times m rows of x."""
    lines: list[str] = []
    for p in range(r):
        lines += [
            f"  %pw{p} = getelementptr float, ptr %w{p}, i64 %c",
            f"  %vw{p} = load {_VECTOR}, ptr %pw{p}, align 4",
            f"  %pf{p} = getelementptr i8, ptr %pw{p}, i64 %ahead",
            f"  call void @llvm.prefetch.p0(ptr %pf{p}, i32 0, i32 3, i32 1)",
        ]
    for q in range(m):
        lines += [
            f"  %px{q} = getelementptr float, ptr %x{q}, i64 %c",
            f"  %vx{q} = load {_VECTOR}, ptr %px{q}, align 4",
        ]
        for p in range(r):
            lines.append(
                f"  %t{p}_{q} = call {_VECTOR} @llvm.fma.v{LANES}f32("
                f"{_VECTOR} %vw{p}, {_VECTOR} %vx{q}, {_VECTOR} %s{p}_{q})"
            )
    return [
        *lines,
        f"  %c.next = add i64 %c, {LANES}",
        "  %more = icmp slt i64 %c.next, %k",
        "  br i1 %more, label %dot, label %reduce",
        "reduce:",
    ]


def _reduction(sums: list[tuple[int, int]]) -> list[str]:
    """Sum the lanes of every accumulator and store: halves first, two accumulators at a time.

    After each level a vector holds twice as many accumulators with half as many partial sums each;
    which accumulators meet in a vector does not change the order within one.
    """
    lines: list[str] = []
    vectors = [f"%t{p}_{q}" for p, q in sums]
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
                    f"{_MASK} <{mask}>"
                )
            lines.append(f"  {name} = fadd {_VECTOR} {name}l, {name}h")
            joined.append(name)
        vectors, size, level = joined, half, level + 1
    for place, (p, q) in enumerate(sums):
        lines += [
            f"  %e{place} = extractelement {_VECTOR} {vectors[place // LANES]}, "
            f"i32 {place % LANES}",
            f"  %oj{place} = mul i64 %ldo, {q}",
            f"  %oi{place} = add i64 %oj{place}, %i{p}",
            f"  %po{place} = getelementptr float, ptr %out, i64 %oi{place}",
            f"  store float %e{place}, ptr %po{place}, align 4",
        ]
    return lines


# Rows `%first` .. `%end` of W, a strip at a time; over each strip pass all blocks of x rows.
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
  br label %strip
strip:
  %i = phi i64 [ %first, %load ], [ %i.next, %strip.end ]
  %left = sub i64 %end, %i
  %rows = call i64 @llvm.smin.i64(i64 %left, i64 {_STRIP})
  %wo = mul i64 %i, %k
  %wi = getelementptr float, ptr %w, i64 %wo
  br label %blocks
blocks:
  %j = phi i64 [ 0, %strip ], [ %j.next, %blocks ]
  %unseen = sub i64 %m, %j
  %count = call i64 @llvm.smin.i64(i64 %unseen, i64 %block)
  %slot = sub i64 %count, 1
  %kernel.p = getelementptr ptr, ptr @blocks, i64 %slot
  %kernel = load ptr, ptr %kernel.p
  %xo = mul i64 %j, %ldx
  %xj = getelementptr float, ptr %x, i64 %xo
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
"""
_ENTRY_SINGLE = f"""{_ENTRY_HEAD}
  call void @strips(ptr %job, i64 0, i64 %n)
  ret void
}}
"""
# The rows of W are shared out in whole groups of LANES; no thread writes what another one does.
_ENTRY_THREADED = f"""
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
define private void @share(ptr %job) #0 {{
entry:
  %me32 = call i32 @omp_get_thread_num()
  %all32 = call i32 @omp_get_num_threads()
  %me = sext i32 %me32 to i64
  %all = sext i32 %all32 to i64
  %n.p = getelementptr %job, ptr %job, i32 0, i32 5
  %n = load i64, ptr %n.p
  %groups = sdiv i64 %n, {LANES}
  %next = add i64 %me, 1
  %a = mul i64 %groups, %me
  %b = mul i64 %groups, %next
  %a.group = sdiv i64 %a, %all
  %b.group = sdiv i64 %b, %all
  %first = mul i64 %a.group, {LANES}
  %end = mul i64 %b.group, {LANES}
  call void @strips(ptr %job, i64 %first, i64 %end)
  ret void
}}
{_ENTRY_HEAD}
  %alone = icmp sle i32 %threads, 1
  br i1 %alone, label %one, label %many
one:
  call void @strips(ptr %job, i64 0, i64 %n)
  ret void
many:
  call void @GOMP_parallel(ptr @share, ptr %job, i32 %threads, i32 0)
  ret void
}}
"""
