"""Fallbacks of a step: counted each time, logged once, and nothing wrong is learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from sglang_dspark.serving.fallbacks import Fallback
from sglang_dspark.serving.metrics import Collector
from sglang_dspark.step.engine import MOST_AWAITED, PIPELINE, confidence_by
from sglang_dspark.step.engine_protocol import Step, StepRequests
from tests.step.engine_scenario import Scenario

LIKELY = 2.0
LAG = 2  # steps between a confidence and a plan that knows it


class Counted(Scenario):
    """A world whose fallbacks are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = CollectorRegistry()
        self.engine.metrics._collector = Collector({"model": "m"}, self.registry)

    def fallbacks(self, fallback: Fallback) -> int:
        labels = {"model": "m", "reason": fallback.value}
        return int(self.registry.get_sample_value("sglang:dspark_fallbacks_total", labels) or 0)

    def begun(self) -> tuple[Step, np.ndarray]:
        """A step that is admitted and has passed, and whose result is still on its way."""
        step = self.engine.begin(
            StepRequests(torch.tensor([1]), self.generation, torch.tensor([10]))
        )
        logits = torch.full((1, max(step.plan.budget.depth, 1)), LIKELY)
        lengths = self.engine.admit(step, logits if step.plan.speculates else None)
        self.now += step.plan.budget.seconds
        return step, lengths


@pytest.fixture
def world() -> Counted:
    world = Counted()
    for _ in range(4):
        world.step([1])
    return world


@pytest.mark.parametrize("late", [1, PIPELINE - 1, PIPELINE, PIPELINE + 1, 40])
def test_results_that_are_late_are_learned_when_they_come(
    world: Counted, caplog: pytest.LogCaptureFixture, late: int
) -> None:
    learned = world.planner.costs.steps
    waiting = [world.begun() for _ in range(late + 1)]
    for step, lengths in waiting:
        world.engine.landed(step, lengths, np.minimum(lengths, 1))
    world.step([1])
    world.engine._learn_all()
    assert world.fallbacks(Fallback.RESULT_LATE) == max(0, late - PIPELINE + 1)
    assert world.fallbacks(Fallback.RESULT_LOST) == 0
    assert world.planner.costs.steps - learned >= late
    assert caplog.text.count("a step's result came late") == (late >= PIPELINE)


def test_results_that_never_come_are_given_up(
    world: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    """One is when a later one has come; without any, when too many are awaited."""
    world.begun()
    world.step([1])
    world.step([1])
    assert world.fallbacks(Fallback.RESULT_LOST) == 1
    for _ in range(MOST_AWAITED + 20):
        world.begun()
    assert len(world.engine._steps) <= MOST_AWAITED + 1
    assert 15 <= world.fallbacks(Fallback.RESULT_LOST) - 1 <= 21
    assert caplog.text.count("a step's result never came") == 1


@pytest.mark.parametrize(("overtaken", "late"), [(2, 0), (3, 1)])
def test_a_result_is_late_that_three_steps_have_overtaken(
    world: Counted, overtaken: int, late: int
) -> None:
    first, lengths = world.begun()
    for _ in range(overtaken):
        world.begun()
    world.engine.landed(first, lengths, lengths)
    assert world.fallbacks(Fallback.RESULT_LATE) == late


def test_a_result_is_awaited_for_256_steps(world: Counted) -> None:
    for _ in range(257):
        world.begun()
    assert world.fallbacks(Fallback.RESULT_LOST) == 0
    world.begun()
    assert world.fallbacks(Fallback.RESULT_LOST) == 1


@pytest.mark.parametrize("jump", [-1.0, -3600.0, float("nan"), float("inf")])
def test_a_time_that_none_is_teaches_nothing(
    world: Counted, caplog: pytest.LogCaptureFixture, jump: float
) -> None:
    known = world.planner.costs.steps
    world.step([1], seconds=jump)
    world.engine._learn_all()
    world.step([1])
    world.engine._learn_all()
    world.now = 10.0 if not np.isfinite(jump) else world.now
    for _ in range(8):
        world.step([1])
    assert 1 <= world.fallbacks(Fallback.NO_TIME) <= 3
    assert caplog.text.count("by its clock; nothing is learned from it") == 1
    assert world.planner.costs.steps >= known + 4
    assert np.isfinite(world.planner.costs.median_error())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_confidence_that_is_not_finite_verifies_and_teaches_nothing(
    world: Counted, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    world.step([1], logit=value, good=0)
    world.engine._learn_all()  # all that came before it
    slopes, shifts = (each.copy() for each in world.calibration.calibration(0))
    found = [world.step([1], logit=value, good=0)[1] for _ in range(6)]
    assert found[LAG:] == [[0]] * (6 - LAG), "only plans made before the first of them go on"
    counted = world.fallbacks(Fallback.NO_CONFIDENCE)
    assert 0 < counted <= 7
    assert caplog.text.count("confidence is not a number") == 1
    world.engine._learn_all()
    assert all(
        (a == b).all()
        for a, b in zip((slopes, shifts), world.calibration.calibration(0), strict=True)
    )


def test_a_device_gives_such_a_confidence_no_chance_either() -> None:
    logits = np.array([[np.nan, np.inf, -np.inf, 0.0]], np.float32)
    found = confidence_by(logits, np.ones((1, 4)), np.zeros((1, 4)))
    assert found.tolist() == [[0.0, 0.0, 0.0, 0.5]]


def test_each_has_its_own_name_and_meaning() -> None:
    assert (
        len({each.value for each in Fallback})
        == len({each.meaning for each in Fallback})
        == len(Fallback)
    )
    assert all(fallback.meaning and "|" not in fallback.meaning for fallback in Fallback)
