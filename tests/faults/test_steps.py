"""Faults within steps of a live server: drafts, confidences, results, clocks. No answer suffers."""

from __future__ import annotations

import time

import pytest

from sglang_dspark.serving.fallbacks import Fallback
from sglang_dspark.step.engine import MOST_AWAITED, PIPELINE
from tests.faults.conftest import Note
from tests.faults.live import Live, Outcome, logged_once, unpoisoned

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("faults")]

FAILED, WORKS = "a draft failed (RuntimeError: injected", "drafting works again, after 3 failures"


@pytest.mark.parametrize(
    ("fault", "where"),
    [("draft-raises", "before it drafts"), ("draft-raises-late", "after it drafted")],
)
def test_a_drafter_that_raises(live: Live, note: Note, fault: str, where: str) -> None:
    failed, works, counted = (
        live.log_count(FAILED),
        live.log_count(WORKS),
        live.fallbacks(Fallback.DRAFT_FAILED),
    )
    live.arm(fault, times=3)
    live.lossless()
    assert live.happened(fault)
    recovered = live.recovered()
    assert live.fallbacks(Fallback.DRAFT_FAILED) - counted == 3
    assert live.log_count(FAILED) == failed + 1, "failures in a row are logged once"
    assert live.log_count(WORKS) == works + 1
    live.at_rest()
    note(
        Outcome(
            f"the drafter raises {where}",
            "those steps decode plainly; drafting pauses and resumes",
            f"`{Fallback.DRAFT_FAILED.value}`",
            recovered,
            0,
            len(live.expected),
        )
    )


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_confidences_that_are_not_finite(live: Live, note: Note, value: str) -> None:
    costs = live.costs()
    with logged_once(live, Fallback.NO_CONFIDENCE, "confidence is not a number", counted=20):
        live.arm("confidence", value=value, times=20)
        live.lossless()
        assert live.happened("confidence")
    recovered = live.recovered()
    unpoisoned(costs, live.costs())
    live.at_rest()
    note(
        Outcome(
            f"confidences are {value} for 20 steps",
            "those drafts count as certain to be rejected; calibration skips them",
            f"`{Fallback.NO_CONFIDENCE.value}`",
            recovered,
            0,
            len(live.expected),
        )
    )


@pytest.mark.parametrize(
    "steps", [1, PIPELINE, 10, 100, pytest.param(MOST_AWAITED + 50, marks=pytest.mark.slow)]
)
def test_results_that_come_late(live: Live, note: Note, steps: int) -> None:
    late, lost = late_and_lost(live)
    costs = live.costs()
    live.arm("results-late", times=steps)
    while not live.happened("results-late"):
        live.lossless()
    recovered = live.recovered()
    overtaken = min(steps, MOST_AWAITED)  # of the first of them
    found = (
        live.fallbacks(Fallback.RESULT_LATE) - late,
        live.fallbacks(Fallback.RESULT_LOST) - lost,
    )
    assert found == (max(0, overtaken - PIPELINE + 1), steps - overtaken)
    unpoisoned(costs, live.costs())
    live.at_rest()
    note(
        Outcome(
            f"results of {steps} steps arrive together, the first {steps} steps late",
            "plans are made without them; calibration uses them when they arrive"
            if steps <= MOST_AWAITED
            else f"results more than {MOST_AWAITED} steps late are discarded",
            f"`{Fallback.RESULT_LATE.value}`"
            if steps >= PIPELINE
            else "none: a step late is normal",
            recovered,
            0,
            len(live.expected),
        )
    )


@pytest.mark.slow
def test_results_that_come_late_by_1_to_100_steps(live: Live) -> None:
    for steps in range(1, 101):
        late, _ = late_and_lost(live)
        live.arm("results-late", times=steps)
        while not live.happened("results-late"):
            assert live.ask(steps % 12) == live.expected[steps % 12]
        live.recovered()
        assert live.fallbacks(Fallback.RESULT_LATE) - late == max(0, steps - PIPELINE + 1)
    live.at_rest()


def test_results_that_never_come(live: Live, note: Note) -> None:
    costs = live.costs()
    with logged_once(live, Fallback.RESULT_LOST, "a step's result never came", counted=30):
        live.arm("results-lost", times=30)
        live.lossless()
        assert live.happened("results-lost")
        recovered = live.recovered()
    unpoisoned(costs, live.costs())
    live.at_rest()
    note(
        Outcome(
            "30 results never arrive",
            "calibration skips those steps",
            f"`{Fallback.RESULT_LOST.value}`",
            recovered,
            0,
            len(live.expected),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_step_clock_that_jumps(live: Live, note: Note, seconds: float) -> None:
    costs, counted = live.costs(), live.fallbacks(Fallback.NO_TIME)
    outliers = live.count("sglang:dspark_step_time_outliers")
    live.arm("step-clock-jumps", seconds=seconds, times=8)  # a step before a prefill has no time
    live.lossless()
    assert live.happened("step-clock-jumps")
    recovered = live.recovered()
    unpoisoned(costs, live.costs())
    live.at_rest()
    if seconds < 0:
        assert 1 <= live.fallbacks(Fallback.NO_TIME) - counted <= 8
        assert live.log_count("nothing is learned from it") >= 1
    else:
        assert live.count("sglang:dspark_step_time_outliers") > outliers
    note(
        Outcome(
            f"the clock of steps jumps by {seconds:+.0f} s, 8 times",
            "those steps' times are ignored" if seconds < 0 else "those steps are outliers",
            f"`{Fallback.NO_TIME.value}`" if seconds < 0 else "`sglang:dspark_step_time_outliers`",
            recovered,
            0,
            len(live.expected),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_wall_clock_that_jumps(live: Live, note: Note, seconds: float) -> None:
    costs = live.costs()
    live.arm("clock-jumps", seconds=seconds)
    live.lossless()
    began = time.monotonic()
    assert live.served.healthy()
    assert time.monotonic() - began < 20
    live.disarm("clock-jumps")
    recovered = live.recovered()
    live.lossless()
    unpoisoned(costs, live.costs())
    live.at_rest()
    note(
        Outcome(
            f"the wall clock jumps by {seconds:+.0f} s and back",
            "none: steps are timed by a monotonic clock",
            "none",
            recovered,
            0,
            2 * len(live.expected),
        )
    )


def late_and_lost(live: Live) -> tuple[int, int]:
    """Results so far."""
    return live.fallbacks(Fallback.RESULT_LATE), live.fallbacks(Fallback.RESULT_LOST)
