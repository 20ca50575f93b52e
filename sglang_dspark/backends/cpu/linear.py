"""Compute x W^T + bias: our kernel for few rows, BLAS for many.

A decode step is bound by reading W once; a verify step of 6 rows should cost about the same, but
BLAS libraries repack or re-read W for so few rows. csrc/matmul.cpp multiplies each row of W with
all rows of x while it is in registers, and prefetches the next rows. W stays in its [N, K] layout,
so float32 weights that are tied or sliced elsewhere are unchanged. Packed weights
(weight_formats.py) are widened in registers, or multiplied directly with rounded rows.

The order of additions does not depend on the row count or the threads (csrc/matmul.cpp): the kernel
is batch-invariant, so verification and plain decoding compute the same.

Above `MAX_ROWS` rows BLAS multiplies, as its blocking may be faster on processors that were not
measured. Our kernel still multiplies int8 weights and rounded rows, as BLAS results would differ.
Six float32 rows need about the time of one (results/products_cpu.json). On one core with AVX2, no
row count up to 512 was slower than `F.linear`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import csrc
from sglang_dspark.backends.cpu.csrc import library
from sglang_dspark.backends.cpu.threads import pool_threads
from sglang_dspark.backends.cpu.weight_formats import (
    BFLOAT16,
    BYTES,
    FLOAT32,
    INT8,
    PANELS,
    WeightFormat,
    dense,
    format_of,
    is_packed,
)
from sglang_dspark.errors import DSparkError
from sglang_dspark.serving.config import current_config

REVISION = 6  # of kernels and formats: step times saved under another revision are measured again
LANES = 16
MAX_ROWS = 256
# Weights for each further thread: a part of half that size costs more to hand over.
_WEIGHTS_PER_THREAD = 1 << 17

# The numbers of csrc/matmul.h, in which bfloat16 with rows rounded to bfloat16 is another format.
_FORMATS = {FLOAT32: 0, BFLOAT16: 1, INT8: 3, BYTES: 4}
_ROUNDED_BFLOAT16 = 2
# Bits of csrc/library.cpp
_VNNI, _BF16, _AMD = 4, 8, 16


@dataclass(frozen=True)
class NarrowMatmul:
    """A matrix kernel: `call(x, row_stride, rows, W, N, K, out, threads)`.

    x, W and out are addresses; row_stride is in floats; N is a multiple of LANES, K of the format's
    columns; out is [rows, N], contiguous. entry: address of the function, for compiled callers.
    """

    call: Callable[[int, int, int, int, int, int, int, int], None]
    entry: int


@dataclass(frozen=True)
class Processor:
    """Choose kernels by the bits of `dspark_processor`."""

    bits: int

    @classmethod
    @cache  # virtual machines trap the instruction that queries the processor
    def host(cls) -> Processor:
        """Return this machine's processor; without the library all bits are 0."""
        loaded = library()
        return cls(0 if loaded is None else loaded.dspark_processor())

    def multiplies(self, form: WeightFormat) -> bool:
        """Return whether it has dot products of bfloat16 (AVX512-BF16) or bytes (AVX512-VNNI)."""
        return bool(self.bits & {BFLOAT16: _BF16, BYTES: _VNNI}.get(form, 0))

    @property
    def level(self) -> int:
        """Return the cache level to prefetch weights into.

        AMD's first level has few outstanding misses: a Zen 4 reads twice as fast by its second."""
        return 2 if self.bits & _AMD else 1


def find_matmul(
    processor: Processor,
    form: WeightFormat = FLOAT32,
    level: int | None = None,
    *,
    rounding: bool = False,
) -> NarrowMatmul:
    """Return the kernel for a processor and W in a format. Raises DSparkError if it has none.

    level: of the cache that weights are prefetched into, None for the processor's; int8 ignores
    it. rounding: whether rows of x are rounded to bfloat16 for bfloat16 weights, on a processor
    that `multiplies` them.
    """
    loaded, number = library(), _ROUNDED_BFLOAT16 if rounding else _FORMATS[form]
    level = processor.level if level is None else level
    entry = None if loaded is None else loaded.dspark_matmul(processor.bits, number, level)
    if entry is None:
        raise DSparkError(
            f"there is no product with {form.name} weights for this processor; set cpu.weights to "
            "bfloat16 in the configuration"
        )
    p, n = ctypes.c_void_p, ctypes.c_int64
    kind = ctypes.CFUNCTYPE(None, p, n, n, p, n, n, p, ctypes.c_int32)
    return NarrowMatmul(kind(entry), entry)


def why_not() -> str | None:
    """Return the reason why this process multiplies by `F.linear`; None if our kernel does."""
    if not current_config().cpu.matrix_kernel:
        return "cpu.matrix_kernel is false in the configuration"
    return csrc.why_not()


def rounds(form: WeightFormat) -> bool:
    """Return whether rows are rounded to the width of a format's weights (`cpu.activations`).

    To bfloat16 for `BFLOAT16`, to eight bits for `BYTES`."""
    activations = current_config().cpu.activations
    wanted = activations == "narrow" if form is BYTES else activations != "wide"
    return wanted and Processor.host().multiplies(form)


def served(form: WeightFormat) -> WeightFormat:
    """Return the stored format for a configured one: int8 in the layout that the kernel reads."""
    return BYTES if form is INT8 and rounds(BYTES) else form


def activations_for(form: WeightFormat) -> str:
    """Name the type of activations in products with a format's weights."""
    if form in PANELS:
        return "8-bit" if form is BYTES else "16-bit"
    return "bfloat16" if rounds(form) else "float32"


@cache
def prepare(form: WeightFormat = FLOAT32) -> NarrowMatmul | None:
    """Return the kernel for this processor and a format of weights; start the pool's threads.

    None where `why_not` has a reason; `F.linear` multiplies then. Raises `DSparkError` where the
    processor cannot multiply such weights.
    """
    if why_not() is not None:
        return None
    pool_threads(torch.get_num_threads())
    return find_matmul(Processor.host(), form, rounding=form is BFLOAT16 and rounds(form))


def kernel_of(weight: Tensor) -> NarrowMatmul | None:
    """Return the kernel that reads a weight in place; None where there is none."""
    form = format_of(weight)
    return None if form is None else prepare(form)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear`: x [..., K], weight [N, K], bias [N] or None -> [..., N].

    Our kernel computes it where `eligible`, and is batch-invariant; else `F.linear` does, with the
    float32 numbers of a packed weight.
    """
    kernel = kernel_of(weight)
    if kernel is None or not eligible(x, weight):
        wide = x.dtype is torch.float32 and (weight.dtype is torch.bfloat16 or is_packed(weight))
        return torch.nn.functional.linear(x, dense(weight) if wide else weight, bias)
    out = narrow(kernel, x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), weight)
    if bias is not None:
        out += bias
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])


def eligible(x: Tensor, weight: Tensor) -> bool:
    """Return whether our kernel can and should compute this product; it has no gradients.

    Requires float32 rows on the CPU, 1 to `MAX_ROWS` of them (any number where BLAS would compute
    differently), and a weight whose format the kernel reads in place (`format_of`).
    """
    form = format_of(weight)
    if x.dtype is not torch.float32 or form is None:
        return False
    k = weight.shape[1]
    return (
        x.dim() >= 1
        and x.shape[-1] == k
        and x.numel() > 0
        and (x.numel() <= MAX_ROWS * k or form in PANELS or rounds(form))
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and x.is_cpu
    )


def narrow(kernel: NarrowMatmul, x: Tensor, weight: Tensor, threads: int | None = None) -> Tensor:
    """Multiply by the kernel: x [M, K], weight [N, K], both `eligible` -> [M, N] float32.

    kernel: of the weight's format. threads: None for torch's number, fewer for a small weight.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    m, (n, k) = len(x), weight.shape
    if threads is None:
        threads = threads_for(n, k)
    out = x.new_empty(m, n)
    kernel.call(x.data_ptr(), x.stride(0), m, weight.data_ptr(), n, k, out.data_ptr(), threads)
    return out


def threads_for(n: int, k: int) -> int:
    """Choose the threads for a weight [n, k]: torch's number, fewer for a small weight."""
    return max(1, min(torch.get_num_threads(), n * k // _WEIGHTS_PER_THREAD))
