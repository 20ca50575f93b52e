"""A CUDA device for machines without one, as far as training can tell: tensors that say they lie
there, and an error wherever one meets a tensor of the host, as torch raises it on a GPU.

Values are computed on the CPU, and so is what autocast rounds. Not pretended: streams, generators
of random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
# What takes tensors of two devices: copies; and a tensor there may be indexed from the host.
_CROSSING = ("copy_", "_to_copy", "_copy_from")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class Elsewhere(Tensor):
    """A tensor on the pretended device; `held` are its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        return Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=held.device,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def cpu(self, *_: Any) -> Tensor:  # type: ignore[override]
        return self.detach().held.clone()

    def to(self, *args: Any, **options: Any) -> Tensor:
        given = (*args, *options.values())
        places = [each for each in given if isinstance(each, str | torch.device)]
        dtypes = [each for each in given if isinstance(each, torch.dtype)]
        if places and torch.device(places[0]).type == "cpu":
            return self.cpu().to(*dtypes)
        return super().to(*dtypes) if dtypes else self

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held!r})"


class _Device(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    there = any(isinstance(each, Elsewhere) for each in tensors)
    name = func._schema.name.removeprefix("aten::")
    if there:
        _check(name, args, tensors)
    asked = kwargs.get("device")
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
        # Within backward passes autograd asks for what its gradients claim in C++ to be on.
        there = torch.device(asked).type == "cuda" or torch._C._current_graph_task_id() != -1
    out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if func._schema.is_mutable:
        written = kwargs.get("out", args[0] if args else None)
        return written if isinstance(written, Tensor) else out
    return tree_map(_elsewhere, out) if there else out


def _check(name: str, args: Any, tensors: list[Tensor]) -> None:
    if name in _CROSSING or (name in _INDEXING and isinstance(args[0], Elsewhere)):
        return
    here = [each for each in tensors if not isinstance(each, Elsewhere) and each.dim()]
    if here:
        raise RuntimeError(f"{name}: tensors on cuda:0 and cpu, of shape {tuple(here[0].shape)}")


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Elsewhere) else value


def _elsewhere(value: Any) -> Any:
    plain = isinstance(value, Tensor) and not isinstance(value, Elsewhere)
    return Elsewhere(value) if plain else value


@contextmanager
def cuda() -> Iterator[torch.device]:
    """Within, tensors can be made on and moved to the device that is given."""
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    autocast = torch.autocast

    def here(kind: str, *args: Any, **options: Any) -> Any:
        return autocast("cpu" if kind == "cuda" else kind, *args, **options)

    tensor = torch.tensor

    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = tensor(data, **options)  # what torch makes of lists is not dispatched
        return made if device is None else made.to(device)

    try:
        with (
            mock.patch("torch.cuda._lazy_init", return_value=None),
            mock.patch("torch.autocast", here),
            mock.patch("torch.tensor", made),
            _Device(),
        ):
            yield CUDA
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
