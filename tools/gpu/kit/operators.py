"""Compare kernels changed since the last GPU run, then time a step's operators in CUDA graphs.

First comparisons and compilations run in parallel processes. Then this process times operators of
`sglang_dspark.benchmarks.operators` and prints each row at once. Without a device the comparisons
run in Triton's interpreter and nothing is timed. Ends with status 1, after printing all rows, if a
comparison is off or one of our operators could not be timed.
"""

from __future__ import annotations

import os
import sys

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, and for spawned processes

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_dspark.benchmarks.operators import candidates, compile_share
from sglang_dspark.benchmarks.timing import Candidate, timed
from tools.gpu.kit import parity
from tools.gpu.kit.device import device_name, say, seconds_left
from tools.gpu.kit.processes import run_together
from tools.gpu.kit.stages import GOES_ON

# New since results/gpu_operators_windows_h200.json; `python -m tools.gpu.kit.parity` compares all.
CHANGED = ("accept_listed", "greedy", "penalise", "certainty")
# That file has attention, rows and the commit; the run ended before admission.
TIMED = ("accept", "penalise", "certainty", "markov", "admission")
PREPARING_S = 40.0  # comparing and compiling; remaining kernels are compiled when they are timed
COMPILED_IN = {**dict.fromkeys(TIMED, 1), "accept": 4}  # processes
ENDING_S = 2.0


def main() -> int:
    left, measured = seconds_left(), torch.cuda.is_available()
    device = "cuda" if measured else "cpu"
    say(device=device_name(), measured=measured, interpreted=not measured)
    findings = parity.Findings(CHANGED, device)
    jobs: dict[str, Callable[[], Any]] = dict(parity.jobs(CHANGED, device))
    if measured:
        jobs |= compiling()
    seconds = min(PREPARING_S, left() / 2) if measured else left()
    for job, found in run_together(jobs, parity.PROCESSES[device], seconds):
        if job.split()[0] in CHANGED:
            findings.add(job, found)
        elif isinstance(found, BaseException):
            print(f"operators: {job}: {found}", file=sys.stderr, flush=True)
    if not measured:
        return 0 if findings.whole else 1
    say(left_s=round(left(), 1))
    return time_all(findings.whole, left)


def compiling() -> dict[str, Callable[[], int]]:
    """Return jobs that compile the timed operators, by names that differ from kernels'."""
    return {
        f"compiling {name} {part + 1}/{parts}": partial(compile_share, name, part, parts)
        for name, parts in COMPILED_IN.items()
        for part in range(parts)
    }


def time_all(whole: bool, left: Callable[[], float]) -> int:
    """Time every candidate while time is left; return the stage's status.

    whole: all comparisons passed.
    """
    for candidate in candidates(TIMED):
        if left() < ENDING_S:
            say(ended_before=f"{candidate.op} {candidate.shape} {candidate.case}")
            return GOES_ON if whole else 1
        row = timed(candidate)
        say(row=row)
        torch.cuda.empty_cache()
        if failed(candidate, row):
            print(f"operators: {row}", file=sys.stderr, flush=True)
            whole = False
    return 0 if whole else 1


def failed(candidate: Candidate, row: dict[str, Any]) -> bool:
    """Return whether one of our implementations has no time; a peer may have none."""
    return candidate.ours and row["us"] is None


if __name__ == "__main__":
    sys.exit(main())
