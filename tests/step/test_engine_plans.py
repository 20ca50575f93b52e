"""Plans of the engine over the real planner: confidences, limits, floors and repeats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_dspark.schedule.budget import Gains
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.serving.speed_targets import SpeedTargets
from sglang_dspark.step.engine_protocol import GREEDY, SAMPLED, StepRequests
from tests.step.engine_scenario import GAMMA, SLOTS, Request, Scenario


def test_sure_drafts_are_verified_and_doubtful_ones_are_not() -> None:
    sure, doubtful = Scenario(), Scenario()
    for _ in range(4):
        plan, lengths = sure.step([1, 2], logit=4.0)
        other, few = doubtful.step([1, 2], logit=-4.0, good=0)
    assert plan.known == other.known == 2
    assert lengths == [GAMMA, GAMMA]
    assert sum(few) <= 1


def test_plans_see_confidences_of_two_steps_ago_only() -> None:
    world = Scenario()
    known = [world.step([1])[0].known for _ in range(4)]
    assert known == [0, 0, 1, 1]


def test_drafts_whose_confidence_is_nan_are_not_verified(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = Scenario()
    for _ in range(8):
        _, lengths = world.step([1, 2], logit=float("nan"), good=0)
    assert lengths == [0, 0]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "--dtype float32" in caplog.text


def test_a_new_generation_of_a_slot_is_unknown() -> None:
    world = Scenario()
    for _ in range(4):
        world.step([1, 2])
    world.generation[2] += 1
    plan, _ = world.step([1, 2])
    assert plan.known == 1


def test_drafting_that_does_not_pay_is_skipped() -> None:
    world = Scenario(token=20e-3)
    steps = [world.step([1, 2, 3, 4], logit=-3.0, good=0) for _ in range(100)]
    skipped = [lengths for plan, lengths in steps if not plan.speculates]
    assert len(skipped) > 60
    assert all(lengths == [0, 0, 0, 0] for lengths in skipped)


def test_most_steps_of_a_plain_phase_repeat_its_plan() -> None:
    world = Scenario(token=20e-3)
    plans = [world.step([1, 2, 3, 4], logit=-3.0, good=0)[0] for _ in range(120)]
    plain = [plan for plan in plans if plan.mode is Mode.PLAIN]
    fresh = len({plan.step for plan in plain})
    assert 0.2 < fresh / len(plain) < 0.5
    assert any(plan.mode is Mode.PROBE_SPECULATE for plan in plans), "it never tries again"
    resting = next(i for i in range(1, 120) if plans[i] is plans[i - 1])
    assert plans[resting].mode is Mode.PLAIN


def test_another_batch_is_planned_afresh_in_a_plain_phase() -> None:
    world = Scenario(token=20e-3)
    while world.step([1, 2, 3, 4], logit=-3.0, good=0)[0].mode is not Mode.PLAIN:
        pass
    plan, lengths = world.step([1, 2, 3], logit=-3.0, good=0)
    assert plan.requests == len(lengths) == 3
    first = world.step([1, 2, 3], logit=-3.0, good=0)[0]
    world.engine.interrupted()
    assert world.step([1, 2, 3], logit=-3.0, good=0)[0] is not first


def test_sampled_and_greedy_requests_are_calibrated_apart() -> None:
    world = Scenario()
    for _ in range(30):
        slots = torch.tensor([1, 2])
        step = world.engine.begin(StepRequests(slots, world.generation, torch.tensor([10, 10])))
        plan = step.plan
        logits = torch.full((2, plan.budget.depth), 2.0) if plan.speculates else None
        step.regimes = np.array([GREEDY, SAMPLED])
        lengths = world.engine.admit(step, logits)
        world.engine.landed(step, lengths, np.minimum(lengths, [GAMMA, 0]))
        world.now += 0.025
    greedy, sampled = world.calibration.gaps()[:, 0]
    assert greedy > 0 > sampled


def told_apart() -> Scenario:
    """Two requests with equal logits; the drafts of the first fail, those of the second do not."""
    world = Scenario(token=6e-3)
    for _ in range(40):
        slots = torch.tensor([1, 2])
        step = world.engine.begin(StepRequests(slots, world.generation, torch.tensor([10, 10])))
        plan = step.plan
        logits = torch.full((2, plan.budget.depth), 0.5) if plan.speculates else None
        lengths = world.engine.admit(step, logits)
        world.engine.landed(step, lengths, np.minimum(lengths, [0, GAMMA]))
        world.now += plan.budget.seconds
    return world


def test_the_shift_of_a_request_reaches_its_admission() -> None:
    """On the host and, as lines, on a device; in the order of the batch's requests."""
    world = told_apart()
    step = world.engine.begin(
        StepRequests(torch.tensor([2, 1]), world.generation, torch.tensor([10, 10]))
    )
    while not step.plan.speculates:
        step = world.engine.begin(
            StepRequests(torch.tensor([2, 1]), world.generation, torch.tensor([10, 10]))
        )
    logits = torch.full((2, step.plan.budget.depth), 0.5)
    slopes, shifts = world.engine.calibrate(step)
    assert np.array_equal(slopes[0], slopes[1])
    assert (shifts[0] > shifts[1] + 0.2).all()
    lengths = world.engine.admit(step, logits)
    assert step.confidence is not None
    said = step.confidence[:, : step.plan.budget.depth]
    assert (said[0] > said[1] + 0.05).all()
    assert lengths[0] > lengths[1]


@pytest.mark.parametrize("limits", [None, [GAMMA, GAMMA, GAMMA], [0, 0, 0]])
def test_a_step_has_the_context_of_all_its_requests(limits: list[int] | None) -> None:
    world = Scenario()
    most = None if limits is None else np.array(limits)
    lens = torch.tensor([10, 0, 30])
    plan = world.engine.begin(
        StepRequests(torch.tensor([1, 2, 3]), world.generation, lens, limits=most)
    ).plan
    assert plan.context == 40


def test_the_request_whose_drafts_do_better_is_admitted_first() -> None:
    """Equal heads: only their own outcomes tell the requests apart."""
    world = told_apart()

    def confidences() -> Gains:
        """Confidences of equal logits for the present requests of the two slots."""
        slots = np.array([1, 2]), world.generation.numpy()[[1, 2]]
        logits, regimes = np.full((2, GAMMA), 0.5, np.float32), np.full(2, GREEDY)
        return world.calibration.confidence(logits, regimes, np.zeros_like(logits), slots)

    said = confidences()
    assert (said[1] > said[0] + 0.05).all()
    world.generation[2] += 1  # the slot changes hands: its new generation is an average request
    fresh = confidences()
    assert (fresh[0] < fresh[1]).all()
    assert (fresh[1] < said[1]).all()


def test_a_fairness_floor_gives_every_request_drafts() -> None:
    fair, free = Scenario(floor=1), Scenario()
    for world in (fair, free):
        for _ in range(6):
            slots = torch.tensor([1, 2])
            step = world.engine.begin(StepRequests(slots, world.generation, torch.tensor([10, 10])))
            plan = step.plan
            assert plan.speculates
            logits = torch.tensor([[4.0], [-4.0]]).repeat(1, plan.budget.depth)
            lengths = world.engine.admit(step, logits)
            world.engine.landed(step, lengths, np.minimum(lengths, [GAMMA, 0]))
            world.now += plan.budget.seconds
        assert (lengths[1] > 0) == (world is fair)
        assert lengths[0] > 1


def test_a_step_that_may_not_draft_is_planned_from_nothing() -> None:
    world = Scenario()
    for _ in range(4):
        assert world.step([1, 2], logit=4.0)[0].speculates
    plan, lengths = world.step([1, 2], limits=[0, 0])
    assert lengths == [0, 0]
    assert (plan.mode, plan.settled, plan.known, plan.gain) == (Mode.PLAIN, False, 0, 0.0)
    assert (plan.requests, plan.context, plan.budget.drafts) == (2, 20, 0)


def test_a_request_behind_its_speed_gets_its_drafts_first() -> None:
    """Four equal requests; the last asks for more than it gets, the others do not."""
    ticks = iter(range(10_000))
    world = Scenario(token=4e-3, speeds=SpeedTargets(SLOTS, clock=lambda: 0.05 * next(ticks)))
    reqs = [Request(str(row), [], row=row) for row in range(1, 5)]
    drafts = np.zeros(4)
    for step in range(60):
        reqs[3].speed = None if step < 30 else 1e3
        plan, lengths = world.step([1, 2, 3, 4], logit=1.0, good=2)
        if step == 29:
            assert np.ptp(drafts) <= 15, drafts  # ties go by place
            drafts[:] = 0
        drafts += lengths
        for req, length in zip(reqs, lengths, strict=True):
            req.output_ids += [0] * (1 + min(length, 2))
        world.engine.processed(reqs, np.minimum(lengths, 2).tolist(), plan.speculates)
    assert plan.weights is not None
    assert plan.weights.tolist() == [1.0, 1.0, 1.0, 4.0]
    assert drafts[3] > 1.5 * drafts[:3].max()
