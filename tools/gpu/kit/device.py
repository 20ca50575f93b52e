"""Print the device and its ceilings: a copy of 2 GiB, products of 8192 in BF16 and FP8."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import triton

from sglang_dspark.benchmarks.experts import ceilings


def found() -> dict[str, Any]:
    """Return versions, and memory and ceilings if there is a CUDA device."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    about: dict[str, Any] = {"device": device_name(), **versions, "triton": triton.__version__}
    if torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        about["memory_gib"] = round(here.total_memory / 2**30, 1)
        about["multiprocessors"] = here.multi_processor_count
        about["capability"] = list(torch.cuda.get_device_capability())
        about["ceilings"] = asdict(ceilings())
    return about


def device_name() -> str:
    """Return the GPU's name, or "no CUDA device"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"


def seconds_left() -> Callable[[], float]:
    """Return a function that returns the seconds left to the stage, counted from this call."""
    ends = time.monotonic() + float(os.environ.get("KIT_SECONDS", "120"))
    return lambda: ends - time.monotonic()


def say(**found: Any) -> None:
    """Print a line of a stage's result, flushed so that a later crash does not lose it."""
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    say(**found())
