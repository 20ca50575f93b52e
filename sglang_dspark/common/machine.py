"""This machine in words: what step times depend on, and how fast it is.

A cloud's model name may say no more than "AMD EPYC", so family, model and stepping are next to it.
`cpu_description` is the same at every start, and part of the keys of kept measurements. Machines of
one description can still differ in speed: result files therefore add `speed`, taken anew.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# As /proc/cpuinfo names them on x86 and, the second three, on ARM.
_NUMBERS = {
    "cpu family": "family",
    "model": "model",
    "stepping": "stepping",
    "CPU implementer": "implementer",
    "CPU part": "part",
    "CPU revision": "revision",
}
_X86 = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile")
_ISA = (*_X86, "amx_bf16", "asimd", "sve", "bf16")
_SPEED = "; one thread: "
_SIDE = 768  # rows and columns of the product: 2.4 MB a matrix
_COPIED = 64 << 20  # bytes, far more than the caches hold
_REPEATS = 7


def has_bfloat16_products() -> bool:
    """Return whether this CPU multiplies bfloat16; emulated, products take tens of times as long.

    True where the instruction sets are not known.
    """
    flags = _flags(_fields())
    return not flags or not flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def _fields() -> dict[str, str]:
    """Return what /proc/cpuinfo says of the first core."""
    fields: dict[str, str] = {}
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields


def _flags(fields: dict[str, str]) -> set[str]:
    """Return the instruction sets, as x86 or ARM names them."""
    return set((fields.get("flags") or fields.get("Features", "")).split())


@cache
def cpu_description() -> str:
    """Model and its numbers, instruction sets, usable cores and OpenMP setting of this CPU."""
    fields = _fields()
    model = fields.get("model name") or platform.processor() or platform.machine()
    numbers = " ".join(f"{name} {fields[key]}" for key, name in _NUMBERS.items() if key in fields)
    flags = _flags(fields)
    isa = " ".join(name for name in _ISA if name in flags) or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS", "server default")
    named = f"{model}, {numbers}" if numbers else model
    return f"{named}; {isa}; {cores} cores; OMP_NUM_THREADS {threads}"


@cache
def speed() -> str:
    """Of one thread, now: float32 products in GFLOP/s and copying in GB/s, read and write counted.

    Medians of a few, about 0.3 s on an idle machine. It differs from call to call of a program, so
    it is no part of any key.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
        product = torch.empty(_SIDE, _SIDE)
        source = torch.ones(_COPIED // 4)
        target = torch.empty_like(source)
        flops = 2 * _SIDE**3 / _median_seconds(lambda: torch.mm(a, b, out=product))
        copied = 2 * _COPIED / _median_seconds(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)
    return f"{flops / 1e9:.0f} GFLOP/s float32, {copied / 1e9:.1f} GB/s copied"


def with_speed(device: str) -> str:
    """A device as result files name it: this CPU with its speed, any other as it is."""
    return f"{device}{_SPEED}{speed()}" if device == cpu_description() else device


def without_speed(device: str) -> str:
    """The device of a result file, the same for every file of one machine."""
    return device.partition(_SPEED)[0]


def _median_seconds(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
