"""Plans of one or two requests that draft serve four steps, each of which is learned from."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.plan import Plan
from tests.step.engine_scenario import Scenario


def settled(
    world: Scenario, rows: list[int], steps: int = 40, *, ahead: bool = False
) -> list[Plan]:
    """Plans of steps of requests whose drafts are sure."""
    return [world.step(rows, logit=3.0, good=3, ahead=ahead)[0] for _ in range(steps)]


@pytest.mark.parametrize("rows", [[1], [1, 2]])
def test_a_plan_of_few_requests_that_draft_serves_four_steps(rows: list[int]) -> None:
    world = Scenario()
    plans = settled(world, rows)
    drafting = [plan for plan in plans[12:] if plan.mode is Mode.SPECULATE]
    assert len(drafting) > 20
    assert len(drafting) / len({id(plan.budget) for plan in drafting}) > 3
    numbers = [plan.step for plan in drafting]
    assert len(set(numbers)) == len(numbers), "of the relay's lag each step has its own"
    assert all(plan.speculates and plan.known == len(rows) for plan in drafting)
    assert world.planner.experience.costs.median_error() < 0.01, "every step teaches"
    ages = []
    for _ in range(8):
        settled(world, rows, 1)
        ages.append(world.planner.guard.state(len(rows)).age)
    pairs = pairwise(ages)
    assert all(after in (before + 1, 1) for before, after in pairs), "each is one of its mode"


def test_a_plan_of_more_requests_serves_one_step() -> None:
    plans = settled(Scenario(), [1, 2, 3])
    assert len({id(plan.budget) for plan in plans}) == len(plans)


def test_a_plan_without_confidences_serves_one_step() -> None:
    """Those of a new request come two steps later, and count at once."""
    world = Scenario()
    settled(world, [1])
    world.generation[1] += 1
    first, second, *_ = settled(world, [1], 4)
    assert (first.known, first.settled) == (0, True)
    assert second.budget is not first.budget


def test_a_plan_made_ahead_serves_one_step() -> None:
    """With overlap planning delays no step."""
    plans = settled(Scenario(), [1], ahead=True)
    assert len({id(plan.budget) for plan in plans}) == len(plans)


def test_a_plan_without_drafts_serves_one_step() -> None:
    """A request that rests waits for so many steps, not for so many plans."""
    world = Scenario()
    settled(world, [1])
    world.planner.early_exit.limits = lambda step, rows, generations: np.zeros(len(rows), np.int64)
    plans = settled(world, [1], 12)[4:]
    assert all(plan.budget.drafts == 0 for plan in plans)
    assert len({id(plan.budget) for plan in plans}) == len(plans)


@pytest.mark.parametrize("change", ["generation", "order", "limits", "prefill", "fewer"])
def test_another_step_is_planned_afresh(change: str) -> None:
    """For each, the step that would have been the second of a plan."""
    world = Scenario()
    plans = settled(world, [1, 2], 30)
    while world.step([1, 2], logit=3.0, good=3)[0].budget is plans[-1].budget:
        pass  # the newest plan served one step now
    newest = world.engine._steps[-1].plan.budget
    rows, limits = [1, 2], None
    if change == "generation":
        world.generation[2] += 1
    elif change == "order":
        rows = [2, 1]
    elif change == "limits":
        limits = [1, 1]
    elif change == "prefill":
        world.engine.interrupted()
    else:
        rows = [1]
    plan, _ = world.step(rows, logit=3.0, good=3, limits=limits)
    assert plan.budget is not newest
    if change == "limits":
        assert plan.limits.tolist() == [1, 1]
        again, _ = world.step(rows, logit=3.0, good=3)
        assert again.budget is not plan.budget, "its limits are gone"
