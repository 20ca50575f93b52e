"""The engine over the real planner: what is planned, learned and timed in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_dspark.schedule.budget import Gains
from sglang_dspark.schedule.calibration import Calibration
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.cost_table import CostTable, ProfileKey
from sglang_dspark.schedule.guard import SERVING_GUARD, Mode
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.plan import Plan, PlannerConfig
from sglang_dspark.schedule.planner import SearchPlanner
from sglang_dspark.serving.metrics import StepMetrics
from sglang_dspark.serving.speed_targets import SpeedTargets
from sglang_dspark.step.engine import BATCH, GREEDY, ScheduleEngine
from sglang_dspark.step.timing import HostClock

GAMMA, SLOTS = 3, 9
KEY = ProfileKey("target", "drafter", "float32", "cpu", "tp1", "dspark_cpu", "1", 3)


class World:
    """An engine whose clock is moved by hand; drafts are accepted as far as `good` says."""

    def __init__(
        self,
        token: float = 1e-3,
        has_head: bool = True,
        floor: int = 0,
        speeds: SpeedTargets | None = None,
    ) -> None:
        table = CostTable(
            key=KEY,
            knots=(1, 64),
            seconds=(20e-3, 20e-3 + 63 * token),
            padded=False,
            per_request=0.0,
            per_context=0.0,
            draft_requests=(1,),
            draft_seconds=((0.0, 2e-3, 3e-3, 4e-3),),
        )
        config = PlannerConfig(has_head=has_head, guard=replace(SERVING_GUARD, probe=4))
        self.planner = SearchPlanner(GAMMA, SLOTS, CostModel(table, SLOTS), config)
        table = Calibration((1.0,) * GAMMA, spread=0.3)
        self.calibration = OnlineCalibration([table] * 2, pool_rows=SLOTS)
        self.now = 0.0
        self.engine = ScheduleEngine(
            self.planner,
            self.calibration,
            StepMetrics(self.planner, self.calibration),
            clock=HostClock(lambda: self.now),
            floor=floor,
            speeds=speeds,
        )
        self.generation = torch.ones(SLOTS, dtype=torch.int64)

    def step(
        self,
        rows: list[int],
        logit: float | None = 2.0,
        good: int = 2,
        seconds: float | None = None,
        limits: list[int] | None = None,
        *,
        ahead: bool = False,
    ) -> tuple[Plan, list[int]]:
        """One decode step, as long as planned unless told; returns plan and verify lengths."""
        slots, context = torch.tensor(rows), torch.full((len(rows),), 10)
        most = None if limits is None else np.array(limits)
        step = self.engine.begin(slots, self.generation, context, starts=not ahead, limits=most)
        if ahead:
            self.engine.start(step)
        plan = step.plan
        logits: Tensor | None = None
        if plan.speculates and logit is not None:
            logits = torch.full((len(rows), plan.budget.depth), logit)
        lengths = self.engine.admit(step, logits, torch.ones(len(rows), dtype=torch.bool))
        self.engine.landed(step, lengths, np.minimum(lengths, good))
        self.now += plan.budget.seconds if seconds is None else seconds
        return plan, lengths.tolist()


def test_sure_drafts_are_verified_and_doubtful_ones_are_not() -> None:
    sure, doubtful = World(), World()
    for _ in range(4):
        plan, lengths = sure.step([1, 2], logit=4.0)
        other, few = doubtful.step([1, 2], logit=-4.0, good=0)
    assert plan.known == other.known == 2
    assert lengths == [GAMMA, GAMMA]
    assert sum(few) <= 1


def test_plans_see_confidences_of_two_steps_ago_only() -> None:
    world = World()
    known = [world.step([1])[0].known for _ in range(4)]
    assert known == [0, 0, 1, 1]


def test_drafts_whose_confidence_is_no_number_are_not_verified(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    for _ in range(8):
        _, lengths = world.step([1, 2], logit=float("nan"), good=0)
    assert lengths == [0, 0]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "--dtype float32" in caplog.text


def test_a_new_generation_of_a_slot_is_unknown() -> None:
    world = World()
    for _ in range(4):
        world.step([1, 2])
    world.generation[2] += 1
    plan, _ = world.step([1, 2])
    assert plan.known == 1


def test_drafting_that_does_not_pay_is_skipped() -> None:
    world = World(token=20e-3)
    steps = [world.step([1, 2, 3, 4], logit=-3.0, good=0) for _ in range(100)]
    skipped = [lengths for plan, lengths in steps if not plan.speculates]
    assert len(skipped) > 60
    assert all(lengths == [0, 0, 0, 0] for lengths in skipped)


def test_most_steps_of_a_plain_phase_repeat_its_plan() -> None:
    world = World(token=20e-3)
    plans = [world.step([1, 2, 3, 4], logit=-3.0, good=0)[0] for _ in range(120)]
    plain = [plan for plan in plans if plan.mode is Mode.PLAIN]
    fresh = len({plan.step for plan in plain})
    assert 0.2 < fresh / len(plain) < 0.5
    assert any(plan.mode is Mode.PROBE_SPECULATE for plan in plans), "it never tries again"
    resting = next(i for i in range(1, 120) if plans[i] is plans[i - 1])
    assert plans[resting].mode is Mode.PLAIN


def test_a_repeated_plain_step_teaches_nothing() -> None:
    world = World(token=20e-3)
    while world.step([1, 2, 3, 4], logit=-3.0, good=0)[0].mode is not Mode.PLAIN:
        pass
    known, plans = world.planner.costs.steps, set()
    for _ in range(12):
        plans.add(world.step([1, 2, 3, 4], logit=-3.0, good=0)[0].step)
    assert world.planner.costs.steps - known <= len(plans) + 1 < 8


def test_another_batch_is_planned_afresh_in_a_plain_phase() -> None:
    world = World(token=20e-3)
    while world.step([1, 2, 3, 4], logit=-3.0, good=0)[0].mode is not Mode.PLAIN:
        pass
    plan, lengths = world.step([1, 2, 3], logit=-3.0, good=0)
    assert plan.requests == len(lengths) == 3
    first = world.step([1, 2, 3], logit=-3.0, good=0)[0]
    world.engine.interrupted()
    assert world.step([1, 2, 3], logit=-3.0, good=0)[0] is not first


def test_a_step_is_timed_until_the_next_begins() -> None:
    world = World()
    world.step([1], seconds=0.030)
    world.step([1], seconds=0.040)
    for _ in range(2 * BATCH):
        world.step([1])
    errors = world.planner.costs._errors
    assert world.planner.costs.steps == 2 * BATCH
    assert np.nanmax(errors[:2]) > 0.1 > np.nanmax(errors[2 : 2 * BATCH])


def test_settled_speculation_is_learned_from_in_batches() -> None:
    world = World()
    known = []
    for _ in range(3 * BATCH):
        world.step([1])
        known.append(world.planner.costs.steps)
    assert sorted(set(known)) == [0, BATCH, 2 * BATCH]


def test_a_step_that_a_prefill_followed_is_not_timed_but_learned() -> None:
    world = World()
    for _ in range(BATCH + 1):
        world.step([1], logit=4.0, good=0, seconds=5.0)
        world.engine.interrupted()
    assert world.planner.costs.steps == 0
    assert world.calibration.gaps()[0, 0] < 0


def test_a_step_without_outcome_teaches_nothing() -> None:
    world = World()
    world.engine.begin(torch.tensor([1]), world.generation, torch.tensor([10]))
    world.now += 1.0
    for _ in range(BATCH + 1):
        world.step([1])
    assert world.planner.costs.steps == BATCH
    assert np.nanmax(world.planner.costs._errors[:BATCH]) < 0.1


def test_without_a_head_past_acceptance_schedules() -> None:
    good, bad = World(has_head=False), World(has_head=False)
    for _ in range(60):
        _, many = good.step([1], logit=None, good=3)
        _, few = bad.step([1], logit=None, good=0)
    assert many == [GAMMA]
    assert few == [0] or few == [1]


def test_sampled_and_greedy_requests_are_calibrated_apart() -> None:
    world = World()
    for _ in range(30):
        slots = torch.tensor([1, 2])
        step = world.engine.begin(slots, world.generation, torch.tensor([10, 10]))
        plan = step.plan
        logits = torch.full((2, plan.budget.depth), 2.0) if plan.speculates else None
        lengths = world.engine.admit(step, logits, torch.tensor([True, False]))
        world.engine.landed(step, lengths, np.minimum(lengths, [GAMMA, 0]))
        world.now += 0.025
    greedy, sampled = world.calibration.gaps()[:, 0]
    assert greedy > 0 > sampled


def told_apart() -> World:
    """Two requests with equal logits; the drafts of the first fail, those of the second do not."""
    world = World(token=6e-3)
    for _ in range(40):
        slots = torch.tensor([1, 2])
        step = world.engine.begin(slots, world.generation, torch.tensor([10, 10]))
        plan = step.plan
        logits = torch.full((2, plan.budget.depth), 0.5) if plan.speculates else None
        lengths = world.engine.admit(step, logits, torch.ones(2, dtype=torch.bool))
        world.engine.landed(step, lengths, np.minimum(lengths, [0, GAMMA]))
        world.now += plan.budget.seconds
    return world


def test_the_shift_of_a_request_reaches_its_admission() -> None:
    """On the host and, as lines, on a device; in the order of the batch's requests."""
    world = told_apart()
    step = world.engine.begin(torch.tensor([2, 1]), world.generation, torch.tensor([10, 10]))
    while not step.plan.speculates:
        step = world.engine.begin(torch.tensor([2, 1]), world.generation, torch.tensor([10, 10]))
    logits = torch.full((2, step.plan.budget.depth), 0.5)
    slopes, shifts = world.engine.calibrate(step, None)
    assert np.array_equal(slopes[0], slopes[1])
    assert (shifts[0] > shifts[1] + 0.2).all()
    lengths = world.engine.admit(step, logits, None)
    assert step.confidence is not None
    said = step.confidence[:, : step.plan.budget.depth]
    assert (said[0] > said[1] + 0.05).all()
    assert lengths[0] > lengths[1]


@pytest.mark.parametrize("limits", [None, [GAMMA, GAMMA, GAMMA], [0, 0, 0]])
def test_a_step_has_the_context_of_all_its_requests(limits: list[int] | None) -> None:
    world = World()
    most = None if limits is None else np.array(limits)
    lens = torch.tensor([10, 0, 30])
    plan = world.engine.begin(torch.tensor([1, 2, 3]), world.generation, lens, limits=most).plan
    assert plan.context == 40


def test_the_request_whose_drafts_do_better_is_admitted_first() -> None:
    """Equal heads: only their own outcomes tell the requests apart."""
    world = told_apart()

    def confidences() -> Gains:
        """What equal logits mean for whoever holds the two slots now."""
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
    fair, free = World(floor=1), World()
    for world in (fair, free):
        for _ in range(6):
            slots = torch.tensor([1, 2])
            step = world.engine.begin(slots, world.generation, torch.tensor([10, 10]))
            plan = step.plan
            assert plan.speculates
            logits = torch.tensor([[4.0], [-4.0]]).repeat(1, plan.budget.depth)
            lengths = world.engine.admit(step, logits, torch.ones(2, dtype=torch.bool))
            world.engine.landed(step, lengths, np.minimum(lengths, [GAMMA, 0]))
            world.now += plan.budget.seconds
        assert (lengths[1] > 0) == (world is fair)
        assert lengths[0] > 1


@dataclass
class Request:
    """What the engine reads of SGLang's request."""

    rid: str
    output_ids: list[int]
    finished_len: int | None = None
    row: int = 0
    speed: float | None = None

    @property
    def sampling_params(self) -> SimpleNamespace:
        asked = None if self.speed is None else {"dspark_speed": self.speed}
        return SimpleNamespace(custom_params=asked)

    @property
    def kv(self) -> SimpleNamespace:
        return SimpleNamespace(req_pool_idx=self.row, holds_kv=True)

    def finished(self) -> bool:
        return self.finished_len is not None


def test_tokens_behind_an_answers_end_are_lost() -> None:
    world = World()
    running, over, exact = (Request(name, [0] * 10) for name in "abc")
    delivered = world.planner.delivered
    over.finished_len, exact.finished_len = 8, 10
    world.engine.processed([running, over, exact], [2, 2, 1], True)
    assert delivered._emitted == {True: 8.0, False: 0.0}
    assert delivered._lost == {True: 2.0, False: 0.0}
    # Both take part in one more step, which nobody reads; the one that runs on is read.
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
    world = World()
    rows, context = torch.tensor([1]), torch.tensor([10])
    first, second = (world.engine.begin(rows, world.generation, context) for _ in range(2))
    landed = second if newest_landed else first
    world.engine.landed(landed, np.array([0]), np.array([0]))
    world.engine.processed([Request("a", [0] * 10, finished_len=10)], [0], False)
    assert second.over == newest_landed
    world.engine.begin(rows, world.generation, context)
    assert second.ended is None, "other work may have run until then"


def test_a_step_that_is_planned_twice_before_it_starts_is_not_timed() -> None:
    world = World()
    rows, context = torch.tensor([1]), torch.tensor([10])
    dropped = world.engine.begin(rows, world.generation, context, starts=False)
    step = world.engine.begin(rows, world.generation, context, starts=False)
    world.engine.start(step)
    assert (dropped.began, step.began) == (None, 0.0)
    assert dropped.ended is None


def test_a_step_that_may_not_draft_is_planned_from_nothing() -> None:
    world = World()
    for _ in range(4):
        assert world.step([1, 2], logit=4.0)[0].speculates
    plan, lengths = world.step([1, 2], limits=[0, 0])
    assert lengths == [0, 0]
    assert (plan.mode, plan.settled, plan.known, plan.gain) == (Mode.PLAIN, False, 0, 0.0)
    assert (plan.requests, plan.context, plan.budget.drafts) == (2, 20, 0)


def test_speculation_whose_tokens_nobody_gets_does_not_pay() -> None:
    drafted = []
    for lost in (0, 6):  # of the 8 tokens that two requests emit in a step
        world = World(token=6e-3)
        plans = [world.step([1, 2], logit=4.0, good=GAMMA)[0] for _ in range(4)]
        for _ in range(200):
            plan, lengths = world.step([1, 2], logit=4.0, good=GAMMA)
            world.planner.delivered.emitted(plan.speculates, 2 + sum(lengths))
            world.planner.delivered.lost(plan.speculates, lost if plan.speculates else 0)
            plans.append(plan)
        drafted.append(sum(plan.speculates for plan in plans[-100:]))
    assert drafted[0] > 80
    assert drafted[1] < 30


def test_a_request_behind_its_speed_gets_its_drafts_first() -> None:
    """Four equal requests; the last asks for more than it gets. Nobody else asks."""
    ticks = iter(range(10_000))
    world = World(token=4e-3, speeds=SpeedTargets(SLOTS, clock=lambda: 0.05 * next(ticks)))
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
