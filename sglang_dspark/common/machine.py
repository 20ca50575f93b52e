"""Describe this machine: the CPU facts that step times depend on, and its speed.

A cloud's model name may be only "AMD EPYC", so family, model and stepping are added.
`cpu_description` is the same at every start and part of the keys of cached measurements. Machines
of one description can still differ in speed, so result files add `speed`, measured anew.
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
# Fields of /proc/cpuinfo: the first three on x86, the last three on ARM.
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

    True if the instruction sets are unknown.
    """
    flags = _flags(_fields())
    return not flags or not flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def _fields() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the first core."""
    fields: dict[str, str] = {}
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields


def _flags(fields: dict[str, str]) -> set[str]:
    """Return the instruction sets by their x86 or ARM names."""
    return set((fields.get("flags") or fields.get("Features", "")).split())


@cache
def cpu_description() -> str:
    """Return the CPU's model and numbers, instruction sets, usable cores and OpenMP setting."""
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
    """Measure one thread: float32 products in GFLOP/s, copies in GB/s (reads and writes counted).

    Uses the median of seven repeats, about 0.3 s on an idle machine. The result differs between
    runs of a program, so no key contains it.
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
    """Return a device's name for result files: this CPU's with its speed, any other unchanged."""
    return f"{device}{_SPEED}{speed()}" if device == cpu_description() else device


def without_speed(device: str) -> str:
    """Return the device of a result file without its speed, the same for all files of a machine."""
    return device.partition(_SPEED)[0]


def _median_seconds(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
