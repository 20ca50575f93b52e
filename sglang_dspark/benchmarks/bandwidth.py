"""Measure a device's memory bandwidth with a kernel that reads and writes.

A captured `copy_` is a node of the copy engine, which is slower than the processors: 2.7 TB/s on an
H200, where kernels exceed 4 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.benchmarks.timing import microseconds

BYTES = 2**31  # of the source, too large for a cache
_BLOCK = 8192  # numbers of a program


def bytes_per_second(size: int = BYTES) -> float:
    """Return bytes read and written a second by a copy of `size` bytes on the CUDA device."""
    source = torch.empty(size // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / microseconds(lambda: copy_triton(source, target)) * 1e6


def copy_triton(source: Tensor, target: Tensor) -> None:
    """Copy int32 numbers in one launch; both tensors contiguous, of fewer than 2^31 numbers.

    Raises ValueError for other tensors.
    """
    pair = (source, target)
    if source.numel() != target.numel() or not source.numel() < 2**31:
        raise ValueError(f"copies {source.numel()} numbers to {target.numel()}: not as many")
    if any(each.dtype != torch.int32 or not each.is_contiguous() for each in pair):
        raise ValueError("copies contiguous int32 only")
    grid = (triton.cdiv(source.numel(), _BLOCK),)
    _copy_kernel[grid](source, target, source.numel(), block=_BLOCK, num_warps=8)


@triton.jit
def _copy_kernel(source, target, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
