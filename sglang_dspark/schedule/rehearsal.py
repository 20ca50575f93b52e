"""Compile the scheduler's functions before the first request.

Without this, the first start would compile them for some 7 s after all models are loaded. So the
process that starts a server runs `python -m sglang_dspark.schedule.rehearsal`, which compiles them
into the cache on disk while the server imports and loads.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from dataclasses import replace

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.calibration import Calibration
from sglang_dspark.schedule.compiled import cache_folder
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.cost_table import CostTable, ProfileKey
from sglang_dspark.schedule.guard import SERVING_GUARD
from sglang_dspark.schedule.guarded import SearchPlanner
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.plan import PlannerConfig
from sglang_dspark.schedule.planner_protocol import Planner
from sglang_dspark.schedule.sts_file import REGIMES

SPREAD = 0.1  # without a table, variance of logits between requests: the demo drafter's
_GAMMA, _REQUESTS = 5, 8  # arbitrary: compiled code supports all sizes


def rehearse(planner: Planner, calibration: OnlineCalibration) -> None:
    """Run some steps of one request, which compiles every function that a step calls."""
    rows, generations = np.zeros(1, np.int64), np.ones(1, np.int64)
    confidence = np.full((1, planner.gamma), 0.5, np.float32)
    logits, none = np.zeros((1, planner.gamma), np.float32), np.zeros(1, np.int64)
    for step in range(4):
        plan = planner.plan(step, rows, generations, context=0)
        calibration.confidence(logits, none, confidence, (rows, generations))
        lengths = planner.admit(plan, confidence)
        planner.publish(plan, rows, generations, confidence)
        planner.finished(plan, rows, generations, none, lengths, confidence, plan.budget.seconds)
        calibration.observe(logits, none, none, none, (rows, generations), confidence)


def uncalibrated(gamma: int, pool_rows: int) -> OnlineCalibration:
    """Make a calibration for a drafter without a table."""
    table = replace(Calibration.identity(gamma), spread=SPREAD)
    return OnlineCalibration([table] * len(REGIMES), pool_rows=pool_rows)


def compile_early() -> None:
    """Start a process that compiles the functions, unless a server of this version has done so.

    It only saves time: the server compiles every function that is still missing.
    """
    if multiprocessing.parent_process() is not None:  # one of the server's own processes
        return
    try:
        if any(cache_folder().rglob("*.nbi")):  # Numba makes the folder when a module is imported
            return
        subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, DSparkError):
        return  # no home directory for a cache, or no second process


def main() -> None:
    """Compile the functions of the default planner, with made-up step times."""
    names = ("model", "drafter", "dtype", "device", "parallel", "backend", "versions")
    key = ProfileKey(**dict.fromkeys(names, "rehearsal"), gamma=_GAMMA)
    drafts = tuple(0.001 * depth for depth in range(_GAMMA + 1))
    table = CostTable(
        key=key,
        knots=(1, 48),
        seconds=(0.01, 0.05),
        padded=False,
        per_request=0.0,
        per_context=0.0,
        draft_requests=(1,),
        draft_seconds=(drafts,),
    )
    config = PlannerConfig(lag=2, guard=SERVING_GUARD)
    planner = SearchPlanner(_GAMMA, _REQUESTS, CostModel(table, _REQUESTS), config)
    rehearse(planner, uncalibrated(_GAMMA, _REQUESTS))


if __name__ == "__main__":
    main()
