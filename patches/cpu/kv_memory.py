"""Map the KV pool's memory and let the kernel allocate its pages when tokens are first written.

Upstream (`MHATokenToKVPool._create_buffers_normal`, sglang/srt/mem_cache/memory_pool.py) fills the
pool with zeros, which takes seconds of each start and a quarter of the machine's free memory, also
for a server that holds few tokens. A new mapping reads as zeros too.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sglang_dspark.patches.seam import Seams

SEAMS = Seams(device="cpu")
_SMALLEST = 1 << 20  # bytes; smaller tensors are allocated as usual


@SEAMS.around(
    "cpu-kv-memory",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
    why="upstream writes zeros to all of the pool, seconds of each start",
)
def create_buffers(original: Callable[[Any], None], self: Any) -> None:
    """Create the buffers as new mappings (AROUND hook of `_create_buffers_normal`)."""
    with _MappedZeros():
        original(self)


class _MappedZeros(TorchFunctionMode):
    """Replace `torch.zeros` of a CPU tensor by a mapping."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function is not torch.zeros:
            return function(*args, **named)
        return mapped_zeros(args[0], named["dtype"])


def mapped_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros whose pages are allocated when they are first written."""
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if size < _SMALLEST:
        return torch.zeros(shape, dtype=dtype)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages would be allocated by reads
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=private), dtype=torch.uint8)
    return memory.view(dtype).view(shape)
