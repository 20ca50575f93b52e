"""Make torch report an H200: tensors stay on the CPU; streams, events and graphs do nothing.

A graph runs its work once, at capture, and replays nothing, so answers are noise. The fake shows
that servers import, compile for sm_90, capture graphs and answer.
"""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CAPABILITY = (9, 0)
FREE = 20 << 30  # bytes
HERE = SimpleNamespace(
    major=9, minor=0, name="NVIDIA H200", uuid="0", total_memory=140 << 30,
    multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, L2_cache_size=60 << 20, shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10,
    is_integrated=False, is_multi_gpu_board=False, gcnArchName="", pci_bus_id=0,
)  # fmt: skip


class Stream:
    """A stream whose work is complete at once."""

    device, stream_id, priority = torch.device("cpu"), 0, 0
    cuda_stream = property(lambda self: id(self) & 0xFFFF)

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """An event that is always complete."""

    cuda_event = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any, **__: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Event) -> float:
        return 1.0


class Graph:
    """A graph whose work ran once, at capture; a replay does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: (0, 0)


class Generator(torch.Generator):
    """A CPU generator in place of the device's."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, _here(device))


class Nothing(contextlib.nullcontext):  # type: ignore[type-arg]
    """A context that accepts any arguments and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class OnTheCpu(TorchFunctionMode):
    """Map `cuda` to the CPU, initialise empty tensors to zero, and clamp indices to the tensor."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _here(each) for name, each in (kwargs or {}).items()}
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        args = tuple(map(_here, args))
        func = _ZEROS.get(func, func)
        name = getattr(func, "__name__", "")
        if name in _INDEXED and len(args) > 2 and isinstance(args[2], torch.Tensor):
            most = max(args[0].shape[args[1]] - 1, 0)
            args = (*args[:2], args[2].clamp(0, most), *args[3:])
        return func(*args, **kwargs)


_ZEROS = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}
_INDEXED = ("scatter_", "scatter", "gather", "take_along_dim", "scatter_add_")


def _here(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def fake_device() -> None:
    """Install the faked device in all threads of this process."""
    stream = Stream()
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True,
        "get_device_capability": CAPABILITY, "get_device_name": HERE.name,
        "get_device_properties": HERE, "mem_get_info": (FREE, FREE),
        "is_current_stream_capturing": False, "current_stream": stream, "default_stream": stream,
        "graph_pool_handle": (0, 0), "memory_stats": {},
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), 0),
        **dict.fromkeys(("max_memory_reserved", "set_device", "synchronize", "empty_cache"), 0),
        **dict.fromkeys(("reset_peak_memory_stats", "manual_seed_all", "set_stream"), None),
        "set_sync_debug_mode": None,
        **dict.fromkeys(("_lazy_init", "init", "ipc_collect", "_sleep"), None),
    }  # fmt: skip
    classes = {
        "Stream": Stream, "ExternalStream": Stream, "Event": Event, "CUDAGraph": Graph,
        "graph": Nothing, "stream": Nothing, "StreamContext": Nothing, "device": Nothing,
        "use_mem_pool": Nothing, "MemPool": Graph,
    }  # fmt: skip
    for module in (torch.cuda, torch.cpu):
        for name, answer in answers.items():
            setattr(module, name, lambda *_, answer=answer, **__: answer)
        for name, kind in classes.items():
            setattr(module, name, kind)
    torch.Generator = Generator  # type: ignore[misc]
    torch.Stream, torch.Event = Stream, Event  # type: ignore[assignment,misc]
    graphs: Any = torch.cuda.graphs
    graphs.graph, graphs.CUDAGraph = Nothing, Graph
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment,method-assign]
    OnTheCpu().__enter__()
    run = threading.Thread.run

    def mapped(self: threading.Thread) -> None:
        with OnTheCpu():
            run(self)

    threading.Thread.run = mapped  # type: ignore[method-assign]
    _fake_groups()


def _fake_groups() -> None:
    """Create all process groups with gloo."""
    groups: Any = torch.distributed
    first, more = groups.init_process_group, groups.new_group

    def init_process_group(_backend: Any = None, *rest: Any, **given: Any) -> Any:
        given = {k: v for k, v in given.items() if k not in ("backend", "device_id", "pg_options")}
        return first("gloo", *rest, **given)

    def new_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return more(ranks, backend="gloo")

    for module in (groups, groups.distributed_c10d):
        module.init_process_group, module.new_group = init_process_group, new_group
