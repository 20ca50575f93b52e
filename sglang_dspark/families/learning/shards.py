"""Rows of a tensor that FSDP shards over the processes."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's rows of a sharded tensor, or an unsharded tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
