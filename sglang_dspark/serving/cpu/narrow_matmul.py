"""Machine code for out = x W^T with few rows of float32 x, straight from the weights as they lie.

A decode step is bound by reading W once; a verify step of 6 rows should cost about the same, but
BLAS libraries repack or re-read W for so few rows. Here each W row meets all rows of x while it is
in registers, and the rows to come are prefetched. W stays in its [N, K] layout: no second copy. A
W in bfloat16 (weight_formats.py) is widened to float32 there, a row once for all rows of x, or, on
processors that can, multiplied as it is with rows rounded likewise; one in int8 is multiplied in
integers.

Every output element is one chain over ascending k, of 16-lane fused multiply-adds or of what the
other ways have for these, then, but for int8, one fixed pairwise sum of the lanes. The blocking
changes with the row count, that order does not: a row's result is bit-identical whatever rows share
the product, so a verified token and a decoded token see the same arithmetic.

The LLVM assembly (narrow_matmul_text.py) is compiled by llvmlite (Numba's back end, without Numba).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]

from sglang_dspark.serving.cpu.narrow_matmul_text import LANES, MAX_BLOCK_ROWS, assembly
from sglang_dspark.serving.cpu.thread_pool import ThreadPool
from sglang_dspark.serving.cpu.weight_formats import (
    BFLOAT16,
    BYTES,
    FLOAT32,
    INT8,
    WeightFormat,
)

REVISION = 4  # of the code and of what it reads: step times kept under another are measured again

__all__ = [
    "AVX2",
    "LANES",
    "MAX_BLOCK_ROWS",
    "REVISION",
    "NarrowMatmul",
    "Processor",
    "compile_matmul",
]


@dataclass(frozen=True)
class NarrowMatmul:
    """Compiled product; `call(x, row_stride, rows, block, W, N, K, out, threads)`.

    x, W and out are addresses; row_stride is in floats; block <= MAX_BLOCK_ROWS rows of x are taken
    together (as many as it likes where it rounds them to bfloat16); N is a multiple of LANES, K of
    the format's columns; out is [rows, N] without gaps.
    entry: address of the same function, for compiled callers.
    threads_available: False where there is no pool of threads; `threads` must then be 1.
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
    @lru_cache(maxsize=1)  # LLVM asks the processor a hundred times
    def host(cls) -> Processor:
        """This machine's."""
        return cls(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())

    @property
    def wide(self) -> bool:
        """Whether it has 32 registers of 16 floats."""
        return "+avx512f" in self.features.split(",")

    def wide_for(self, form: WeightFormat) -> bool:
        """The same for a format's product; that of int8 is of 16-bit integers."""
        return self.wide and (form is not INT8 or "+avx512bw" in self.features.split(","))

    def multiplies(self, form: WeightFormat) -> bool:
        """Whether it adds products of bfloat16 numbers (AVX512-BF16) or of bytes (AVX512-VNNI)."""
        needed = {BFLOAT16: "+avx512bf16", BYTES: "+avx512vnni"}.get(form)
        return self.wide and needed in self.features.split(",")

    @property
    def level(self) -> int:
        """The cache that weights are best fetched into. AMD's first level waits for few lines at a
        time: a Zen 4 reads twice as fast through its second."""
        return 2 if self.name.startswith("znver") else 1

    @property
    def fuses(self) -> bool:
        """Whether it multiplies and adds in one instruction, without which the code would crawl."""
        triple = llvm.get_process_triple()
        if triple.startswith(("x86_64", "amd64")):
            return {"+fma", "+avx2"} <= set(self.features.split(","))
        return triple.startswith(("aarch64", "arm64"))


AVX2 = Processor("haswell", "+avx2,+fma")


def compile_matmul(
    processor: Processor,
    pool: ThreadPool | None,
    form: WeightFormat = FLOAT32,
    level: int | None = None,
    *,
    rounding: bool = False,
) -> NarrowMatmul:
    """Compile for `processor` and W in a format; pool: whose threads share the rows of W.

    level: of the cache that weights are fetched into, None for the processor's. rounding: whether
    rows of x are rounded to bfloat16 before they meet such weights, where it `multiplies` them.
    Raises RuntimeError when LLVM rejects the assembly or the target (a fault of this file).
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    threaded = pool is not None
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=processor.name, features=processor.features, opt=3
    )
    level, wide = processor.level if level is None else level, processor.wide_for(form)
    text = assembly(form, wide=wide, threaded=threaded, level=level, rounding=rounding)
    module = llvm.parse_assembly(text)
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
