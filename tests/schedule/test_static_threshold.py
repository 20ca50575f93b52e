"""The schedule by a threshold alone: prefixes above it, at any cost of a step."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_dspark.schedule.calibration import Calibration
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.simulation.scenarios import Machine
from sglang_dspark.schedule.static_threshold import PROBE_EVERY, ThresholdPlanner

GAMMA, SLOTS = 4, 8
ROWS, GENERATIONS = np.arange(3), np.ones(3, np.int64)
CONFIDENCE = np.array(
    [[0.9, 0.6, 0.4, 0.9], [0.5, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.51]], np.float32
)


def planner(threshold: float) -> ThresholdPlanner:
    tokens = 1.0 + 0.1 * np.arange(SLOTS * (GAMMA + 1) + 1)
    depth = np.concatenate([[0.0], np.full(GAMMA, 0.2)])
    machine = Machine(tokens, depth, (1, SLOTS * (GAMMA + 1)), padded=False)
    table = machine.profile(np.random.default_rng(0), 0.0)
    return ThresholdPlanner(threshold, GAMMA, SLOTS, CostModel(table, SLOTS))


def test_a_request_is_verified_up_to_its_first_doubtful_draft() -> None:
    scheduler = planner(0.5)
    plan = scheduler.plan(0, ROWS, GENERATIONS, 100)
    assert plan.speculates
    assert plan.budget.depth == GAMMA
    assert scheduler.admit(plan, CONFIDENCE).tolist() == [2, 0, 4]
    assert planner(0.0).admit(plan, CONFIDENCE).tolist() == [4, 4, 4]
    assert scheduler.admit(plan, None).tolist() == [0, 0, 0]


def test_limits_bind() -> None:
    scheduler = planner(0.5)
    plan = scheduler.plan(0, ROWS, GENERATIONS, 100, limits=np.array([1, 1, 3]))
    assert scheduler.admit(plan, CONFIDENCE).tolist() == [1, 0, 3]


def test_the_budget_is_what_earlier_confidences_let_expect() -> None:
    scheduler = planner(0.5)
    first = scheduler.plan(0, ROWS, GENERATIONS, 100)
    scheduler.publish(first, ROWS, GENERATIONS, CONFIDENCE)
    scheduler.plan(1, ROWS, GENERATIONS, 100)
    later = scheduler.plan(2, ROWS, GENERATIONS, 100)
    assert later.known == 3
    assert later.budget.drafts == 6
    expected = 3 + 0.9 + 0.9 * 0.6 + sum(np.cumprod([0.9, 0.9, 0.9, 0.51]))
    assert later.budget.theta * later.budget.seconds == pytest.approx(expected, rel=1e-5)


def test_losses_do_not_stop_it() -> None:
    """Outcomes and times change nothing, unlike in the scheduler."""
    scheduler = planner(0.5)
    for step in range(64):
        plan = scheduler.plan(step, ROWS, GENERATIONS, 100)
        lengths = scheduler.admit(plan, CONFIDENCE)
        none = np.zeros(3, np.int64)
        scheduler.finished(
            plan, ROWS, GENERATIONS, none, lengths, CONFIDENCE, 10 * plan.budget.seconds
        )
        assert plan.speculates
        assert lengths.tolist() == [2, 0, 4]


def lengths_of(scheduler: ThresholdPlanner, confidence: NDArray[np.float32]) -> list[list[int]]:
    """Verify lengths of two pauses and a probe more."""
    made = []
    for step in range(2 * PROBE_EVERY + 2):
        plan = scheduler.plan(step, ROWS, GENERATIONS, 100, limits=np.array([4, 4, 1]))
        lengths = scheduler.admit(plan, confidence)
        scheduler.finished(plan, ROWS, GENERATIONS, 0 * lengths, lengths, confidence, None)
        made.append(lengths.tolist())
    return made


def test_what_is_never_verified_is_probed_now_and_then() -> None:
    made = lengths_of(planner(0.5), np.full((3, GAMMA), 0.1, np.float32))
    probes = [step for step, lengths in enumerate(made) if any(lengths)]
    assert probes == [PROBE_EVERY, 2 * PROBE_EVERY + 1]
    assert made[PROBE_EVERY] == [4, 4, 1]


def test_positions_that_are_verified_anyway_are_not_probed() -> None:
    """Here the third is overdue, the first two are not."""
    confidence = np.array([[0.9, 0.9, 0.1, 0.9]] * 3, np.float32)
    made = lengths_of(planner(0.5), confidence)
    assert made[0] == made[PROBE_EVERY + 1] == [2, 2, 1]
    assert made[PROBE_EVERY] == [4, 4, 1]
    full = np.full((3, GAMMA), 0.9, np.float32)
    assert {tuple(each) for each in lengths_of(planner(0.5), full)} == {(4, 4, 1)}


def test_a_calibration_that_fell_below_the_threshold_recovers() -> None:
    """Traffic whose drafts all fail, then one whose drafts are all accepted, told alike."""
    scheduler, online = planner(0.5), OnlineCalibration([Calibration((1.0,) * GAMMA)])
    logits, greedy = np.full((3, GAMMA), 1.0, np.float32), np.zeros(3, np.int64)
    confidence = np.empty((3, GAMMA), np.float32)
    verified = []
    for step in range(6000):
        online.confidence(logits, greedy, confidence)
        plan = scheduler.plan(step, ROWS, GENERATIONS, 100)
        lengths = scheduler.admit(plan, confidence)
        accepted = lengths if step >= 2000 else 0 * lengths
        scheduler.finished(plan, ROWS, GENERATIONS, accepted, lengths, confidence, None)
        online.observe(logits, greedy, accepted, lengths)
        verified.append(int(lengths.sum()))
    assert sum(verified[1800:2000]) <= 4 * 3 * GAMMA  # probes alone
    assert verified[-1] == 3 * GAMMA


@pytest.mark.parametrize("threshold", [-0.1, 1.0])
def test_thresholds_that_mean_nothing(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        planner(threshold)
