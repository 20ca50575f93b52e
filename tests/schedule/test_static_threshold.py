"""The schedule by a threshold alone: prefixes above it, whatever a step costs."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.simulation.scenarios import Machine
from sglang_dspark.schedule.static_threshold import ThresholdPlanner

GAMMA, SEATS = 4, 8
ROWS, TENANTS = np.arange(3), np.ones(3, np.int64)
CONFIDENCE = np.array(
    [[0.9, 0.6, 0.4, 0.9], [0.5, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.51]], np.float32
)


def planner(threshold: float) -> ThresholdPlanner:
    tokens = 1.0 + 0.1 * np.arange(SEATS * (GAMMA + 1) + 1)
    depth = np.concatenate([[0.0], np.full(GAMMA, 0.2)])
    machine = Machine(tokens, depth, (1, SEATS * (GAMMA + 1)), padded=False)
    table = machine.profile(np.random.default_rng(0), 0.0)
    return ThresholdPlanner(threshold, GAMMA, SEATS, CostModel(table, SEATS))


def test_a_request_is_verified_up_to_its_first_doubtful_draft() -> None:
    scheduler = planner(0.5)
    plan = scheduler.plan(0, ROWS, TENANTS, 100)
    assert plan.speculates
    assert plan.budget.depth == GAMMA
    assert scheduler.admit(plan, CONFIDENCE).tolist() == [2, 0, 4]
    assert planner(0.0).admit(plan, CONFIDENCE).tolist() == [4, 4, 4]
    assert scheduler.admit(plan, None).tolist() == [0, 0, 0]


def test_limits_bind() -> None:
    scheduler = planner(0.5)
    plan = scheduler.plan(0, ROWS, TENANTS, 100, limits=np.array([1, 1, 3]))
    assert scheduler.admit(plan, CONFIDENCE).tolist() == [1, 0, 3]


def test_the_budget_is_what_earlier_confidences_let_expect() -> None:
    scheduler = planner(0.5)
    first = scheduler.plan(0, ROWS, TENANTS, 100)
    scheduler.publish(first, ROWS, TENANTS, CONFIDENCE)
    scheduler.plan(1, ROWS, TENANTS, 100)
    later = scheduler.plan(2, ROWS, TENANTS, 100)
    assert later.known == 3
    assert later.budget.drafts == 6
    expected = 3 + 0.9 + 0.9 * 0.6 + sum(np.cumprod([0.9, 0.9, 0.9, 0.51]))
    assert later.budget.theta * later.budget.seconds == pytest.approx(expected, rel=1e-5)


def test_losses_do_not_stop_it() -> None:
    """What the scheduler would do and this schedule does not: outcomes and times change nothing."""
    scheduler = planner(0.5)
    for step in range(64):
        plan = scheduler.plan(step, ROWS, TENANTS, 100)
        lengths = scheduler.admit(plan, CONFIDENCE)
        none = np.zeros(3, np.int64)
        scheduler.finished(plan, ROWS, TENANTS, none, lengths, CONFIDENCE, 10 * plan.budget.seconds)
        assert plan.speculates
        assert lengths.tolist() == [2, 0, 4]


@pytest.mark.parametrize("threshold", [-0.1, 1.0])
def test_thresholds_that_mean_nothing(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        planner(threshold)
