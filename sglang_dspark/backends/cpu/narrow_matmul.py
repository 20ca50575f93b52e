"""out = x W^T with few rows of float32 x, straight from the weights in their own layout.

A decode step is bound by reading W once; a verify step of 6 rows should cost about the same, but
BLAS libraries repack or re-read W for so few rows. Here (csrc/matmul.cpp) each W row meets all rows
of x while it is in registers, and the rows to come are prefetched. W stays in its [N, K] layout: no
second copy. A W in bfloat16 (weight_formats.py) is widened to float32 there, a row once for all
rows of x, or, on processors that can, multiplied as it is with rows rounded likewise; one in int8
is multiplied in integers.

Every output element is one chain over ascending k, of 16-lane fused multiply-adds or of the other
formats' own instructions, then, but for int8, one fixed pairwise sum of the lanes. The blocking
changes with the row count, that order does not: a row's result is bit-identical whatever rows share
the product, so a verified token and a decoded token see the same arithmetic.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from sglang_dspark.backends.cpu.csrc import library
from sglang_dspark.backends.cpu.weight_formats import (
    BFLOAT16,
    BYTES,
    FLOAT32,
    INT8,
    WeightFormat,
)
from sglang_dspark.errors import DSparkError

REVISION = 5  # of the code and of what it reads: step times kept under another are measured again
LANES = 16
MAX_BLOCK_ROWS = 6

# As csrc/matmul.h numbers them; bfloat16 rows rounded likewise are a format there.
_FORMATS = {FLOAT32: 0, BFLOAT16: 1, INT8: 3, BYTES: 4}
_ROUNDED_BFLOAT16 = 2
# Bits of csrc/library.cpp
_FUSES, _VNNI, _BF16, _AMD = 1, 4, 8, 16

__all__ = [
    "AVX2",
    "LANES",
    "MAX_BLOCK_ROWS",
    "REVISION",
    "NarrowMatmul",
    "Processor",
    "find_matmul",
]


@dataclass(frozen=True)
class NarrowMatmul:
    """A product; `call(x, row_stride, rows, block, W, N, K, out, threads)`.

    x, W and out are addresses; row_stride is in floats; block <= MAX_BLOCK_ROWS rows of x are taken
    together (as many as it likes where it rounds them to bfloat16); N is a multiple of LANES, K of
    the format's columns; out is [rows, N] without gaps. Without a pool one thread does all.
    entry: address of the same function, for compiled callers.
    """

    call: Callable[[int, int, int, int, int, int, int, int, int], None]
    entry: int


@dataclass(frozen=True)
class Processor:
    """Choose products by the bits of `dspark_processor`."""

    bits: int

    @classmethod
    @lru_cache(maxsize=1)  # virtual machines trap the instruction that asks the processor
    def host(cls) -> Processor:
        """This machine's; none of the bits where there is no library."""
        loaded = library()
        return cls(0 if loaded is None else loaded.processor())

    def multiplies(self, form: WeightFormat) -> bool:
        """Whether it adds products of bfloat16 numbers (AVX512-BF16) or of bytes (AVX512-VNNI)."""
        return bool(self.bits & {BFLOAT16: _BF16, BYTES: _VNNI}.get(form, 0))

    @property
    def level(self) -> int:
        """The cache that weights are best fetched into. AMD's first level waits for few lines at a
        time: a Zen 4 reads twice as fast through its second."""
        return 2 if self.bits & _AMD else 1

    @property
    def fuses(self) -> bool:
        """Whether it multiplies and adds in one instruction, without which the code would crawl."""
        return bool(self.bits & _FUSES)


AVX2 = Processor(_FUSES)


def find_matmul(
    processor: Processor,
    form: WeightFormat = FLOAT32,
    level: int | None = None,
    *,
    rounding: bool = False,
) -> NarrowMatmul:
    """The product for a processor and W in a format.

    level: of the cache that weights are fetched into, None for the processor's; those of int8 do
    not ask. rounding: whether rows of x are rounded to bfloat16 before they meet such weights,
    where it `multiplies` them. Raises DSparkError where there is none.
    """
    loaded, number = library(), _ROUNDED_BFLOAT16 if rounding else _FORMATS[form]
    level = processor.level if level is None else level
    entry = None if loaded is None else loaded.matmul(processor.bits, number, level)
    if entry is None:
        raise DSparkError(
            f"there is no product with {form.name} weights for this processor; set cpu.weights to "
            "bfloat16 in the configuration"
        )
    address, size = ctypes.c_void_p, ctypes.c_int64
    kind = ctypes.CFUNCTYPE(
        None, address, size, size, size, address, size, size, address, ctypes.c_int32
    )
    return NarrowMatmul(kind(entry), entry)
