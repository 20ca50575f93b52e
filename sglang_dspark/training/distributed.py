"""Handle the differences between one process and many.

Under `torchrun` parameters are sharded with FSDP2 (`fully_shard`): each process holds and updates
its rows, even a single process. The rest of the trainer works on `local` tensors, which are the
whole ones without torchrun.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from sglang_dspark.families.learning.shards import local

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """The processes that train together.

    rank in [0, size). device: where this process computes. sharded: the processes are a process
    group, which may have one member.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU
    sharded: bool = False

    @classmethod
    def join(cls, device: str = "auto") -> World:
        """Join the processes of `torchrun`'s environment; without torchrun this process is alone.

        device: "cpu", "cuda", or "auto" for a GPU if there is one.
        """
        place, sharded = place_of(device), started_by_torchrun()
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if sharded and not dist.is_initialized():
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
        return cls(int(os.environ.get("RANK", "0")), _world_size(), place, sharded)

    @property
    def leads(self) -> bool:
        """Return whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum values over processes, in place; every process gets the result."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def least(self, value: int) -> int:
        """Return the smallest of the processes' values."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)

    def wait(self) -> None:
        """Wait until every process calls this."""
        if self.size > 1:
            dist.barrier()

    def shard(self, module: nn.Module) -> None:
        """Shard the leading process's parameters over all; the module's forward gathers them."""
        if self.sharded:
            for parameter in module.parameters():
                dist.broadcast(parameter.detach(), 0)
            fully_shard(module, mesh=init_device_mesh(self.device.type, (self.size,)))

    def release(self, module: nn.Module) -> None:
        """Release gathered parameters after a forward pass without backward.

        The next pass then gathers the shards' current values.
        """
        if isinstance(module, FSDPModule):
            module.reshard()

    def leave(self) -> None:
        """End the process group, if one was joined, after all processes have arrived."""
        if self.sharded and dist.is_initialized():
            self.wait()
            dist.destroy_process_group()

    def end(self) -> None:
        """End this process with status 0, if torchrun started it.

        Call it last after success: in a `finally` it would hide errors. A thread of gloo that
        outlives the group aborts an interpreter that exits normally (torch 2.13, rarely: it drops a
        tensor after Python has shut down), and torchrun then reports the whole run as failed.
        """
        if self.sharded:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def place_of(device: str) -> torch.device:
    """Return the device that this process computes on; device as in `World.join`."""
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def started_by_torchrun() -> bool:
    """Return whether torchrun, or a program that sets its variables, started this process."""
    return _world_size() > 1 or bool(dist.is_torchelastic_launched())


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def whole(rows: Tensor, like: Tensor) -> Tensor:
    """Gather the processes' rows of a tensor sharded as `like`. All processes must call it."""
    if not isinstance(like, DTensor):
        return rows
    mine = DTensor.from_local(
        rows, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return mine.full_tensor()


def rows_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's rows of a tensor that every process has: the reverse of `whole`."""
    if not isinstance(like, DTensor):
        return tensor
    tensor = tensor.to(like.device)
    return distribute_tensor(
        tensor, like.device_mesh, like.placements, src_data_rank=None
    ).to_local()


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Make the module's parameters plain, whole tensors within. All processes must enter."""
    kept: list[tuple[nn.Module, str, nn.Parameter]] = []
    full: dict[int, nn.Parameter] = {}  # a tied parameter has two owners
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor):
                if id(parameter) not in full:
                    tensor = whole(local(parameter.detach()), parameter)
                    full[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
                kept.append((owner, name, parameter))
    try:
        for owner, name, parameter in kept:
            owner._parameters[name] = full[id(parameter)]
        yield
    finally:
        for owner, name, parameter in kept:
            owner._parameters[name] = parameter
