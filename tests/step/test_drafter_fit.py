"""A drafter that does not fit: one warning, one metric, drafting switched off below a minimum."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from sglang_dspark.schedule.first_drafts import FIRST_REST, LEAST, LEAST_TO_STOP, FirstDrafts
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.serving.fallbacks import Fallback
from sglang_dspark.serving.metrics import Collector, StepMetrics
from sglang_dspark.serving.weight_updates import begin_update
from sglang_dspark.step.drafter_fit import CAUSES, STALE, DrafterFit
from sglang_dspark.step.engine_protocol import StepRequests, VerifyAll
from tests.step.engine_scenario import GAMMA, SLOTS, Scenario

ROWS = [1, 2, 3, 4]


class Watched(Scenario):
    """A scenario with exported metrics; its requests end after 24 steps."""

    def __init__(self, minimum: float | None = None, token: float = 1e-4) -> None:
        super().__init__(token=token, minimum=minimum)
        self.registry = CollectorRegistry()
        collector = Collector({"model_name": "target"}, self.registry)
        self.engine.metrics = StepMetrics(self.planner, self.calibration, collector)
        drafts = FirstDrafts(SLOTS, minimum)
        self.engine._fit = DrafterFit(drafts, self.engine.metrics, self.planner.renew)
        self.taken = 0

    def take(self, steps: int, good: int, logit: float = 2.0, rows: list[int] = ROWS) -> list[Plan]:
        plans = []
        for _ in range(steps):
            self.taken += 1
            if self.taken % 24 == 0:
                self.generation += 1
            plans.append(self.step(rows, logit=logit, good=good)[0])
        return plans

    def value(self, name: str, **labels: str) -> float:
        self.engine.metrics.hand_over()
        labels["model_name"] = "target"
        return self.registry.get_sample_value(f"sglang:dspark_{name}", labels) or 0.0


def update_weights() -> None:
    """SGLang begins an update that finds no model."""
    begin_update([])


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.levelno for record in caplog.records} <= {logging.WARNING}
    return [record.getMessage() for record in caplog.records]


def test_one_line_and_the_metric(caplog: pytest.LogCaptureFixture) -> None:
    world = Watched()
    assert world.value("drafter_misfit") == 0
    world.take(600, good=0)
    (line,) = lines(caplog)
    assert f"0 of {LEAST} first drafts were accepted" in line
    assert "more than 10%" in line
    assert line.endswith(CAUSES)
    places = [line.index(cause) for cause in (
        "sample_from_anchor", "rope_theta", "target_layer_ids", "weight update", "training",
    )]  # fmt: skip
    assert places == sorted(places)
    assert "\n" not in line
    assert world.value("drafter_misfit") == 1
    assert world.value("fallbacks_total", reason=Fallback.ACCEPTANCE_LOW.value) == 0
    assert world.value("steps_total", mode="off") == 0, "without a minimum the guard alone decides"


@pytest.mark.parametrize("rows", [[1], [1, 2], [1, 2, 3, 4]])
@pytest.mark.parametrize("logit", [-3.0, 2.0])
def test_few_users_need_not_wait_long(
    rows: list[int], logit: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The guard decodes plainly nearly from the start: drafts are slow, or confidence is low."""
    world = Watched(token=5e-3)
    plans = []
    while not lines(caplog) and len(plans) < 4000:
        plans += world.take(1, 0, logit, rows)
    assert 32 < len(plans) < 4000 / len(rows)
    drafted = sum(plan.speculates for plan in plans)
    assert drafted < 0.1 * len(plans) + 40, "the first look costs too much"
    plans = world.take(400, 0, logit, rows)
    assert sum(plan.speculates for plan in plans) < 25, "it goes on when it has looked"


@pytest.mark.parametrize("minimum", [None, 0.3])
def test_none_for_a_drafter_that_fits(
    minimum: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    world = Watched(minimum)
    plans = world.take(2000, good=1)
    assert lines(caplog) == []
    assert world.value("drafter_misfit") == 0
    assert sum(plan.speculates for plan in plans) > 1000


def test_an_update_of_weights_counts_anew(caplog: pytest.LogCaptureFixture) -> None:
    world = Watched()
    world.take(600, good=0)
    assert (len(lines(caplog)), world.value("drafter_misfit")) == (1, 1)
    update_weights()
    world.take(4, good=GAMMA)
    assert world.value("drafter_misfit") == 0
    world.take(800, good=GAMMA)
    assert (len(lines(caplog)), world.value("drafter_misfit")) == (1, 0)
    update_weights()
    world.take(600, good=0)
    assert (len(lines(caplog)), world.value("drafter_misfit")) == (2, 1)


def test_drafts_before_an_update_say_nothing_of_the_weights_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit, rows = DrafterFit(FirstDrafts(SLOTS)), torch.tensor(ROWS)
    engine, generation = VerifyAll(GAMMA, fit), torch.ones(SLOTS, dtype=torch.int64)
    for part in range(4):
        for number in range(LEAST // len(ROWS) - 1 + (STALE if part else 0)):
            generation += number % 8 == 0
            step = engine.begin(StepRequests(rows, generation, rows))
            engine.landed(step, engine.admit(step, None), np.zeros(4, np.int64))
        if part < 3:
            update_weights()
    assert lines(caplog) == []
    step = engine.begin(StepRequests(rows, generation + 1, rows))
    engine.landed(step, engine.admit(step, None), np.zeros(4, np.int64))
    assert len(lines(caplog)) == 1, "where all is verified, it is logged too"


def test_below_a_minimum_drafting_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    """At every load, by steps like those of the guard's plain decoding; and tried again."""
    world = Watched(minimum=0.5)
    plans = world.take(8000, good=0, logit=4.0)
    causes, line = lines(caplog)
    assert causes.endswith(CAUSES)
    assert line.startswith(f"sglang-dspark: drafting is switched off: 0 of {LEAST_TO_STOP} first")
    assert "schedule.min_acceptance" in line
    assert CAUSES not in line, "once is enough"
    off = [plan for plan in plans if plan.mode is Mode.OFF]
    assert not any(plan.speculates for plan in off)
    first = plans.index(off[0])
    assert len({plan.step for plan in off if plan.step < off[0].step + FIRST_REST}) == FIRST_REST
    again = next(n for n in range(first, len(plans)) if plans[n].mode is not Mode.OFF)
    assert 3 * FIRST_REST < again - first < 5 * FIRST_REST, "most of these steps reuse a plan"
    assert any(plan.speculates for plan in plans[again:]), "it is never tried again"
    reason = Fallback.ACCEPTANCE_LOW.value
    assert world.value("fallbacks_total", reason=reason) >= 1
    assert world.value("draft_skips_total", reason=reason) == world.value("steps_total", mode="off")
    assert world.value("steps_total", mode="off") > 3 * FIRST_REST
    assert world.value("drafter_misfit") == 1


def test_another_load_does_not_draft_either() -> None:
    world = Watched(minimum=0.5)
    while world.take(1, good=0, logit=4.0)[0].mode is not Mode.OFF:
        pass
    for rows in ([1], [1, 2, 3, 4, 5, 6, 7]):
        assert all(world.step(rows, logit=4.0)[0].mode is Mode.OFF for _ in range(12))


def test_new_weights_switch_drafting_on() -> None:
    world = Watched(minimum=0.5)
    while world.take(1, good=0, logit=4.0)[0].mode is not Mode.OFF:
        pass
    update_weights()
    plans = world.take(8, good=GAMMA, logit=4.0)
    assert plans[4].mode is not Mode.OFF
    plans = world.take(1500, good=GAMMA, logit=4.0)
    assert sum(plan.speculates for plan in plans) > 500
    assert not any(plan.mode is Mode.OFF for plan in plans)


def test_a_drafter_below_the_minimum_that_fits_is_no_misfit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, plans = Watched(minimum=0.9), []
    for number in range(2000):
        plans += world.take(1, good=number % 2)
    assert any(plan.mode is Mode.OFF for plan in plans)
    (line,) = lines(caplog)
    assert "switched off" in line
    assert line.endswith(CAUSES)
    assert world.value("drafter_misfit") == 0


def test_the_causes_are_logged_once_whichever_comes_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit, rows = DrafterFit(FirstDrafts(SLOTS, 0.9)), torch.tensor(ROWS)
    engine, generation = VerifyAll(GAMMA, fit), torch.ones(SLOTS, dtype=torch.int64)
    for number in range(LEAST_TO_STOP):
        generation += number % 8 == 0
        step = engine.begin(StepRequests(rows, generation, rows))
        good = number % 2 if number < LEAST_TO_STOP // 2 else 0
        engine.landed(step, engine.admit(step, None), np.full(4, good))
    (line,) = lines(caplog)
    assert "switched off" in line
    assert line.endswith(CAUSES)


def test_the_guard_measures_anew_after_an_update() -> None:
    world = Watched(token=20e-3)
    while world.take(1, good=0, logit=-3.0)[0].mode is not Mode.PLAIN:
        pass
    assert world.planner.guard.state(len(ROWS)).mode is Mode.PLAIN
    update_weights()
    world.engine._fit.rests()
    state = world.planner.guard.state(len(ROWS))
    assert (state.mode, state.age, state.pause) == (Mode.SPECULATE, 0, 0)
