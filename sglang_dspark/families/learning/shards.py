"""Rows of a tensor that FSDP shards over the processes."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's rows of a sharded tensor; a tensor that is not sharded as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
