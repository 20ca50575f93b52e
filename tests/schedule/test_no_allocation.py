"""The planner's functions allocate no arrays in a step: everything works in memory made before."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Costs, Workspace, early_stop, search
from sglang_dspark.schedule.calibration import Calibration
from sglang_dspark.schedule.gains import gains
from sglang_dspark.schedule.online import OnlineCalibration

REQUESTS, GAMMA = 256, 7
# What a call may hold for a moment: views and boxed numbers, whose size knows nothing of R. One
# array of R int64 or [R, gamma] float32 is larger.
SMALL = 1500


def most_bytes(call: Callable[[], object]) -> int:
    """The least of three measurements: another thread of the test runner allocates now and then."""
    return min(_most_bytes(call) for _ in range(3))


def _most_bytes(call: Callable[[], object]) -> int:
    """Most memory that 20 calls held at once, above what was there before them."""
    call()
    tracemalloc.start()
    try:
        call()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(20):
            call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def contestants() -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    confidence = rng.beta(8, 2, (REQUESTS, GAMMA)).astype(np.float32)
    weights = np.ones(REQUESTS, np.float32)
    workspace, buffer = Workspace(REQUESTS, GAMMA), np.empty_like(confidence)
    tokens = 0.01 + 2e-5 * np.arange(REQUESTS * (GAMMA + 1) + 1)
    costs = Costs(tokens, 1e-3, np.concatenate([[0.0], 1e-3 + 5e-5 * np.arange(GAMMA)]))
    limits, floors = np.full(REQUESTS, GAMMA), np.zeros(REQUESTS, np.int64)
    lengths = np.empty(REQUESTS, np.int64)
    calibration = OnlineCalibration([Calibration((1.0,) * GAMMA, spread=0.1)], pool_rows=REQUESTS)
    logits, slots = (
        rng.normal(size=(REQUESTS, GAMMA)).astype(np.float32),
        (np.arange(REQUESTS),) * 2,
    )
    said = np.full_like(logits, 0.5)
    return {
        "confidence": lambda: calibration.confidence(logits, floors, said, slots),
        "outcomes": lambda: calibration.observe(logits, floors, floors, limits, slots, said),
        "gains": lambda: gains(confidence, out=buffer),
        "gains, weighted": lambda: gains(confidence, weights, buffer),
        "search": lambda: search(buffer, costs, workspace),
        "search, bounded": lambda: search(buffer, costs, workspace, limits=limits, floors=floors),
        "early stop": lambda: early_stop(buffer, costs, workspace),
        "early stop, bounded": lambda: early_stop(
            buffer, costs, workspace, limits=limits, floors=floors
        ),
        "admit": lambda: admit(buffer, 700, workspace, out=lengths),
        "admit, bounded": lambda: admit(
            buffer, 700, workspace, limits=limits, floors=floors, out=lengths
        ),
    }


@pytest.mark.parametrize("name", sorted(contestants()))
def test_no_arrays_are_allocated(name: str) -> None:
    assert most_bytes(contestants()[name]) < SMALL


def test_an_allocation_would_show() -> None:
    """Positive control: the same functions without memory to write to."""
    confidence = np.full((REQUESTS, GAMMA), 0.5, np.float32)
    workspace = Workspace(REQUESTS, GAMMA)
    assert most_bytes(lambda: gains(confidence)) > SMALL
    assert most_bytes(lambda: admit(confidence, 700, workspace)) > SMALL
