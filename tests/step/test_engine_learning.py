"""Times and outcomes that the engine learns from, and those that it discards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_dspark.schedule.guard import Mode
from sglang_dspark.step.engine import BATCH
from sglang_dspark.step.engine_protocol import StepRequests
from tests.step.engine_scenario import GAMMA, Request, Scenario


def test_a_repeated_plain_step_teaches_nothing() -> None:
    world = Scenario(token=20e-3)
    while world.step([1, 2, 3, 4], logit=-3.0, good=0)[0].mode is not Mode.PLAIN:
        pass
    known, plans = world.planner.costs.steps, set()
    for _ in range(12):
        plans.add(world.step([1, 2, 3, 4], logit=-3.0, good=0)[0].step)
    assert world.planner.costs.steps - known <= len(plans) + 1 < 8


def test_a_step_is_timed_until_the_next_begins() -> None:
    world = Scenario()
    world.step([1], seconds=0.030)
    world.step([1], seconds=0.040)
    for _ in range(2 * BATCH):
        world.step([1])
    errors = world.planner.costs._errors
    assert world.planner.costs.steps == 2 * BATCH
    assert np.nanmax(errors[:2]) > 0.1 > np.nanmax(errors[2 : 2 * BATCH])


def test_settled_speculation_is_learned_from_in_batches() -> None:
    world = Scenario()
    known = []
    for _ in range(3 * BATCH):
        world.step([1])
        known.append(world.planner.costs.steps)
    assert sorted(set(known)) == [0, BATCH, 2 * BATCH]


def test_a_step_that_a_prefill_followed_is_not_timed_but_learned() -> None:
    world = Scenario()
    for _ in range(BATCH + 1):
        world.step([1], logit=4.0, good=0, seconds=5.0)
        world.engine.interrupted()
    assert world.planner.costs.steps == 0
    assert world.calibration.gaps()[0, 0] < 0


def test_a_step_without_outcome_teaches_nothing() -> None:
    world = Scenario()
    world.engine.begin(StepRequests(torch.tensor([1]), world.generation, torch.tensor([10])))
    world.now += 1.0
    for _ in range(BATCH + 1):
        world.step([1])
    assert world.planner.costs.steps == BATCH
    assert np.nanmax(world.planner.costs._errors[:BATCH]) < 0.1


def test_tokens_behind_an_answers_end_are_lost() -> None:
    world = Scenario()
    running, over, exact = (Request(name, [0] * 10) for name in "abc")
    delivered = world.planner.delivered
    over.finished_len, exact.finished_len = 8, 10
    world.engine.processed([running, over, exact], [2, 2, 1], True)
    assert delivered._emitted == {True: 8.0, False: 0.0}
    assert delivered._lost == {True: 2.0, False: 0.0}
    # Both take part in one more step, whose tokens are discarded; the one that runs on is read.
    world.engine.processed([running, over, exact], [2, 3, 0], True)
    assert delivered._lost[True] == pytest.approx(2.0 + 4 + 1, abs=0.1)
    world.engine.processed([running], [0], False)
    assert delivered._lost[False] == 0
    assert delivered._emitted[False] == 1


@pytest.mark.parametrize("newest_landed", [True, False])
def test_at_the_end_of_all_answers_a_step_whose_result_is_known_is_over(
    newest_landed: bool,
) -> None:
    """One whose result has not come stays in flight, also behind one whose result has."""
    world = Scenario()
    rows, context = torch.tensor([1]), torch.tensor([10])
    first, second = (
        world.engine.begin(StepRequests(rows, world.generation, context)) for _ in range(2)
    )
    landed = second if newest_landed else first
    world.engine.landed(landed, np.array([0]), np.array([0]))
    world.engine.processed([Request("a", [0] * 10, finished_len=10)], [0], False)
    assert second.over == newest_landed
    world.engine.begin(StepRequests(rows, world.generation, context))
    assert second.ended is None, "other work may have run until then"


def test_a_step_that_is_planned_twice_before_it_starts_is_not_timed() -> None:
    world = Scenario()
    rows, context = torch.tensor([1]), torch.tensor([10])
    dropped = world.engine.begin(StepRequests(rows, world.generation, context), starts=False)
    step = world.engine.begin(StepRequests(rows, world.generation, context), starts=False)
    world.engine.start(step)
    assert (dropped.began, step.began) == (None, 0.0)
    assert dropped.ended is None


def test_speculation_whose_tokens_are_discarded_does_not_pay() -> None:
    drafted = []
    for lost in (0, 6):  # of the 8 tokens that two requests emit in a step
        world = Scenario(token=6e-3)
        plans = [world.step([1, 2], logit=4.0, good=GAMMA)[0] for _ in range(4)]
        for _ in range(200):
            plan, lengths = world.step([1, 2], logit=4.0, good=GAMMA)
            world.planner.delivered.emitted(plan.speculates, 2 + sum(lengths))
            world.planner.delivered.lost(plan.speculates, lost if plan.speculates else 0)
            plans.append(plan)
        drafted.append(sum(plan.speculates for plan in plans[-100:]))
    assert drafted[0] > 80
    assert drafted[1] < 30
