"""The engine under the overlap loop: a step lands while the next one computes."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from sglang_dspark.schedule.budget import Counts, Gains
from sglang_dspark.schedule.cost_model import Step as Timed
from sglang_dspark.schedule.guarded import SearchPlanner
from sglang_dspark.schedule.plan import PlannerConfig
from sglang_dspark.serving.speed_targets import SpeedTargets
from sglang_dspark.step.drafter_fit import DrafterFit
from sglang_dspark.step.engine import BATCH, ScheduleEngine, confidence_by
from sglang_dspark.step.engine_protocol import Step, StepRequests
from tests.step.engine_scenario import GAMMA, SLOTS, Scenario, looked_at


class Overlapped(Scenario):
    """Plans step t + 1 while t computes; results come one step late. Device time moves by hand."""

    def __init__(self, token: float = 1e-3) -> None:
        super().__init__(token=token)
        config = PlannerConfig(lag=2, guard=self.planner.config.guard)
        self.planner = SearchPlanner(GAMMA, SLOTS, self.planner.costs, config)
        metrics = self.engine.metrics
        clock, fit, speeds = self.engine._clock, DrafterFit(looked_at()), SpeedTargets(SLOTS)
        self.engine = ScheduleEngine(self.planner, self.calibration, metrics, clock, fit, speeds)
        self.flying: deque[tuple[Step, Counts]] = deque()

    def launch(self, rows: list[int], seconds: float | None = None) -> Step:
        """Plan a step, launch it behind the one that computes, then hand out that one's result."""
        slots = torch.tensor(rows)
        contexts = torch.full((len(rows),), 10)
        step = self.engine.begin(StepRequests(slots, self.generation, contexts), starts=False)
        self.engine.start(step)
        if step.plan.speculates:
            self.engine.calibrate(step)
            step.arriving = torch.full((len(rows), GAMMA), 2.0)
        self.now += step.plan.budget.seconds if seconds is None else seconds
        lengths = np.minimum(step.plan.limits, step.plan.budget.drafts // len(rows))
        self.flying.append((step, lengths if step.plan.speculates else 0 * lengths))
        if len(self.flying) > 1:
            self.land()
        return step

    def land(self, good: int = 2) -> None:
        """The oldest result comes to the host."""
        step, lengths = self.flying.popleft()
        self.engine.landed(step, lengths, np.minimum(lengths, good))


def test_a_plan_knows_the_step_before_the_last_and_no_later_one() -> None:
    world = Overlapped()
    known = [world.launch([1]).plan.known for _ in range(6)]
    assert known == [0, 0, 1, 1, 1, 1]


def test_what_has_not_landed_is_not_known() -> None:
    world = Overlapped()
    for _ in range(2):
        slots, contexts = torch.tensor([1]), torch.tensor([10])
        step = world.engine.begin(StepRequests(slots, world.generation, contexts), starts=False)
        world.engine.start(step)
    for _ in range(5):
        step = world.engine.begin(StepRequests(slots, world.generation, contexts), starts=False)
        world.engine.start(step)
        assert step.plan.known == 0
    assert world.planner.costs.steps == 0


def test_every_step_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one before it, nor the one that computes while it is learned."""
    world = Overlapped()
    observed: list[tuple[Timed, float]] = []
    monkeypatch.setattr(
        world.planner.costs,
        "observe",
        lambda step, seconds: observed.append((step, seconds)) or True,
    )
    taken = [0.02 + 0.001 * number for number in range(3 * BATCH)]
    steps = [world.launch([1, 2], seconds) for seconds in taken]
    seconds = [seconds for _, seconds in observed]
    assert len(seconds) >= 2 * BATCH
    assert seconds == pytest.approx(taken[: len(seconds)])
    assert [did.depth for did, _ in observed] == [
        step.plan.budget.depth for step in steps[: len(seconds)]
    ]


def test_a_prefill_between_two_steps_leaves_the_first_without_a_time() -> None:
    world = Overlapped()
    for _ in range(3 * BATCH):
        world.engine.interrupted()
        world.launch([1], seconds=5.0)
    assert world.planner.costs.steps == 0
    assert world.calibration.gaps()[0, 0] != 0


def test_a_step_whose_result_never_arrives_is_skipped() -> None:
    world = Overlapped()
    world.launch([1])
    world.flying.clear()  # its result is lost
    for _ in range(2 * BATCH + 2):
        world.launch([1])
    assert 0 < world.planner.costs.steps <= 2 * BATCH
    assert len(world.engine._steps) <= 3


def test_a_device_computes_the_confidence_of_the_host() -> None:
    world = Scenario()
    for _ in range(20):
        world.step([1, 2], logit=1.0, good=1)
    rng = np.random.default_rng(3)
    logits: Gains = rng.normal(0, 30, (2, GAMMA)).astype(np.float32)
    logits[1, 1] = np.nan
    slots = np.array([1, 2]), world.generation.numpy()[[1, 2]].astype(np.int64)
    regimes = np.array([0, 1])
    on_host = world.calibration.confidence(logits, regimes, np.zeros_like(logits), slots)
    lines = world.calibration.lines(regimes, slots)
    assert np.array_equal(confidence_by(logits, *lines), on_host)  # bit for bit
    assert confidence_by(logits, *lines)[1, 1] == 0.0
