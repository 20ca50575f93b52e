"""The seams of a scheduled step: which layout a step verifies, and what the engine is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from sglang_dspark.patches.cpu_schedule_step import (
    note_non_decode_step,
    schedule_layout,
    should_run_compact,
)
from sglang_dspark.serving.schedule.attach import ENGINE

GAMMA = 3


def planner_with(lengths: list[int]) -> Any:
    """Upstream's planner, its engine with these drafts admitted; counts interruptions."""
    planner = SimpleNamespace(interruptions=0)

    def interrupted() -> None:
        planner.interruptions += 1

    engine = SimpleNamespace(lengths=np.array(lengths), gamma=GAMMA, interrupted=interrupted)
    planner.__dict__[ENGINE] = engine
    return planner


def _never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("upstream's path ran")


@pytest.mark.parametrize("lengths", [[0, 0], [3, 0], [1, 3, 2], [2]])
def test_cut_windows_are_verified_as_they_were_cut(lengths: list[int]) -> None:
    planner = planner_with(lengths)
    layout = schedule_layout(_never, planner)
    assert layout.verify_lens_cpu == [n + 1 for n in lengths]
    assert should_run_compact(_never, planner, layout=layout)


def test_whole_windows_need_no_layout() -> None:
    planner = planner_with([GAMMA, GAMMA])
    assert schedule_layout(_never, planner) is None
    assert not should_run_compact(_never, planner, layout=None)


def test_without_an_engine_upstream_decides() -> None:
    alone = SimpleNamespace()
    assert schedule_layout(lambda planner, **step: ("theirs", step), alone, budget=4) == (
        "theirs",
        {"budget": 4},
    )
    assert should_run_compact(lambda planner, layout: layout == 7, alone, layout=7)
    note_non_decode_step(None, alone)


def test_a_prefill_interrupts() -> None:
    planner = planner_with([1])
    note_non_decode_step(None, planner)
    assert planner.interruptions == 1
