"""Time expert products and a layer of DeepSeek-V4-Flash's shape next to their peers.

Each kind is compared with float64 first, and all kernels are compiled in parallel processes. Then
each row is printed when it is timed, with the share of the device's measured ceiling.
Without a device the comparison runs in Triton's interpreter, and rows are the least times of an
H100 by its data sheet. Ends with status 1 if a kind is off.
"""

from __future__ import annotations

import os
import sys

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, and for spawned processes

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from sglang_dspark.benchmarks import experts
from sglang_dspark.benchmarks.experts import MOST_DIFF, Matrix
from sglang_dspark.benchmarks.layers import LAYERS
from tools.gpu.kit.device import device_name, say, seconds_left
from tools.gpu.kit.processes import run_together
from tools.gpu.kit.stages import GOES_ON

SLIM = Matrix(
    layers=LAYERS[:1],
    kinds=("bf16 x bf16", "fp8 x fp8", "bf16 x mxfp4", "bf16 x nvfp4"),
    tokens=(1, 8, 64, 512),
    routings=("uniform",),
)
PROCESSES = {"cuda": 8, "cpu": 2}
PREPARING_S = 60.0
_ENDING_S = 3.0


def main() -> int:
    left, measured = seconds_left(), torch.cuda.is_available()
    device = "cuda" if measured else "cpu"
    say(device=device_name(), measured=measured)
    whole = prepare(device, min(PREPARING_S, left() / 2) if measured else left())
    if not measured:
        for row in experts.plan(SLIM):
            say(row=row)
        return 0 if whole else 1
    reached = experts.ceilings()
    say(ceilings=asdict(reached))
    ended = print_until(experts.measured(SLIM, reached), left)
    if not whole:
        return 1
    return 0 if ended else GOES_ON


def prepare(device: str, seconds: float) -> bool:
    """Compare every kind and compile all timed kernels; return whether no kind is off."""
    jobs: dict[str, Callable[[], Any]] = {
        kind: partial(experts.correctness, device, [kind]) for kind in SLIM.kinds
    }
    if device == "cuda":
        jobs |= compiling()
    diffs: dict[str, float] = {}
    for job, found in run_together(jobs, PROCESSES[device], seconds):
        if isinstance(found, BaseException):
            print(f"experts: {job}: {found}", file=sys.stderr, flush=True)
        elif job in SLIM.kinds:
            diffs |= found
    say(calc_diff=diffs)
    off = [kind for kind in SLIM.kinds if not diffs.get(kind, float("inf")) <= MOST_DIFF]
    for kind in off:
        print(f"experts: {kind} is off: {diffs.get(kind)}", file=sys.stderr, flush=True)
    return not off


def compiling() -> dict[str, Callable[[], int]]:
    """Return jobs that compile the kernels of one kind and number of tokens each."""
    return {
        f"compiling {kind}, {tokens} tokens": partial(
            experts.compile_kernels, replace(SLIM, kinds=(kind,), tokens=(tokens,))
        )
        for kind in SLIM.kinds
        for tokens in SLIM.tokens
    }


def print_until(rows: Iterator[dict[str, Any]], left: Callable[[], float]) -> bool:
    """Print rows while time is left; return whether all were printed."""
    for row in rows:
        say(row=row)
        if left() < _ENDING_S:
            return next(rows, None) is None
    return True


if __name__ == "__main__":
    sys.exit(main())
