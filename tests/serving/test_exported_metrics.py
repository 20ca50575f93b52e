"""Finished steps in /metrics, on prometheus_client itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from sglang_dspark.serving.metrics import Collector, Finished, StepMetrics, reached
from tests.step.engine_scenario import GAMMA, Request, Scenario

LABELS = {"model_name": "target", "tp_rank": "0"}


@pytest.fixture(scope="module")
def collector() -> Collector:
    """One a process: prometheus_client knows a name once."""
    return Collector(LABELS)


def value(name: str, **labels: str) -> float:
    found = REGISTRY.get_sample_value(f"sglang:dspark_{name}", {**LABELS, **labels})
    return 0.0 if found is None else found


def steps_of(world: Scenario, count: int, **step: Any) -> list[Finished]:
    """`count` steps of the world as its metrics saw them."""
    seen: list[Finished] = []
    keep = world.engine.metrics.step
    world.engine.metrics.step = lambda plan, lengths, accepted, seconds: seen.append(
        Finished(plan, lengths, accepted, seconds)
    )
    while len(seen) < count:
        world.step([1, 2], **step)
    world.engine.metrics.step = keep
    return seen[:count]


def test_positions_are_counted_up_to_each_length() -> None:
    lengths = [np.array([0, 2]), np.array([3, 1])]
    assert reached(lengths, 3).tolist() == [3, 2, 1]


def test_counts_of_steps(collector: Collector) -> None:
    world = Scenario()
    steps = steps_of(world, 12, logit=3.0, good=1)
    names = ("budget_sum", "budget_count", "step_seconds_count", "predicted_step_seconds_sum")
    before = [value(name) for name in names]
    admitted = [value("admitted_drafts_total", position=str(k)) for k in (1, 2, 3)]
    accepted = [value("accepted_drafts_total", position=str(k)) for k in (1, 2, 3)]
    collector.take(steps, GAMMA)
    after = [value(name) for name in names]
    drafts = sum(int(step.lengths.sum()) for step in steps)
    assert drafts > 0
    expected = [drafts, 12, 12, sum(step.plan.budget.seconds for step in steps)]
    assert np.subtract(after, before) == pytest.approx(expected)
    more = [value("admitted_drafts_total", position=str(k)) for k in (1, 2, 3)]
    assert sum(more) - sum(admitted) == drafts
    good = [value("accepted_drafts_total", position=str(k)) for k in (1, 2, 3)]
    assert np.subtract(good, accepted)[1:].tolist() == [0, 0]
    assert good[0] - accepted[0] == sum(int(step.accepted.sum()) for step in steps)


def test_skips_name_their_reason(collector: Collector) -> None:
    world = Scenario(token=20e-3)
    steps = steps_of(world, 60, logit=-3.0, good=0)
    skipped = sum(not step.plan.speculates for step in steps)
    reason = "drafting does not pay"
    before = value("draft_skips_total", reason=reason)
    collector.take(steps, GAMMA)
    assert value("draft_skips_total", reason=reason) - before == skipped > 0


def test_gauges_follow_the_models(collector: Collector) -> None:
    world = Scenario()
    for _ in range(30):
        world.step([1], logit=3.0, good=0, seconds=0.050)
    collector.gauges(world.planner, world.calibration)
    assert value("step_time_error") == pytest.approx(world.planner.costs.median_error())
    assert value("calibration_error", position="1") > 0.05


class Counting:
    """Stands for the collector's two calls. taken: how many steps each hand-over had."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, steps: list[Finished], gamma: int) -> None:
        self.taken.append(len(steps))

    def gauges(self, *models: object) -> None:
        assert self.taken


def test_a_flush_a_second() -> None:
    world = Scenario()
    (step,) = steps_of(world, 1)
    counting = Counting()
    metrics = StepMetrics(world.planner, world.calibration, counting)  # type: ignore[arg-type]
    taken = counting.taken
    for now in np.arange(0, 2.55, 0.1):
        metrics.step(step.plan, step.lengths, step.accepted, 0.1)
        metrics.flush(float(now))
    assert taken[0] == 1
    assert len(taken) == 3
    assert sum(taken) <= 26


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_kept_back_when_the_last_request_has_ended(overlap: bool) -> None:
    """At any time of the clock; with overlap one more step is in flight by then."""
    world = Scenario()
    counting = Counting()
    world.engine.metrics = StepMetrics(world.planner, world.calibration, counting)  # type: ignore[arg-type]
    first, second = Request("a", [0] * 40), Request("b", [0] * 40)
    for number in range(11):
        world.step([1, 2], logit=3.0, seconds=1e-6)
        second.finished_len = 40 if number > 8 else None
        world.engine.processed([first, second], [1, 1], True)
    assert sum(counting.taken) < 11  # one runs on: steps are kept
    world.step([1], logit=3.0, seconds=1e-6)
    first.finished_len = 40
    if overlap:
        world.step([1], logit=3.0, seconds=1e-6)
        world.engine.processed([first], [1], True)
    world.engine.processed([first], [1], True)
    assert sum(counting.taken) == (13 if overlap else 12)
    world.step([1], logit=3.0)  # and the next one is planned as ever
    assert sum(counting.taken) == (13 if overlap else 12)
