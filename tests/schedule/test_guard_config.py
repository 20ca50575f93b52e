"""Check the ends of each guard setting: the last value accepted and the first refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sglang_dspark.schedule.guard import (
    LONGEST_PAUSE,
    SERVING_GUARD,
    SETTLE,
    LoadState,
    Mode,
    advance,
)
from sglang_dspark.schedule.plan import PlannerConfig


@pytest.mark.parametrize(
    ("field", "taken", "refused"),
    [
        ("min_gain", 0.0, -1e-9),
        ("doubt", 0.0, -1e-9),
        ("probe_start_cost", 0.0, -1e-9),
        ("untried_loss", 1e-9, 0.0),
        ("untried_loss", 1 - 1e-9, 1.0),
        ("probe_cost", 1e-9, 0.0),
        ("probe_cost", 1 - 1e-9, 1.0),
        ("probe", SETTLE + 1, SETTLE),
        ("first_pause", 1, 0),
        ("first_pause", LONGEST_PAUSE, LONGEST_PAUSE + 1),
        ("memory", 1.0, 1 - 1e-9),
        ("plain_every", 1, 0),
        ("visit_steps", 1, 0),
    ],
)
def test_the_ends_of_what_is_taken(field: str, taken: Any, refused: Any) -> None:
    assert getattr(replace(SERVING_GUARD, **{field: taken}), field) == taken
    with pytest.raises(ValueError, match=field):
        replace(SERVING_GUARD, **{field: refused})


def test_a_load_without_experience_gains_nothing() -> None:
    assert LoadState(0).gain(SERVING_GUARD) == pytest.approx(1.0)
    assert LoadState(6).gain(SERVING_GUARD) == pytest.approx(1.0)


def test_the_planner_serves_by_the_settings_of_the_published_figures() -> None:
    config = PlannerConfig()
    assert (config.lag, config.max_age, config.signal) == (2, 16, "confidence")
    assert (config.look_deep, config.deep_share) == (16, 0.005)
    assert config.guard is SERVING_GUARD


@pytest.mark.parametrize(("gain", "mode"), [(1.25, Mode.SPECULATE), (1.24, Mode.PROBE_PLAIN)])
def test_plain_decoding_is_not_probed_from_the_configured_gain_on(gain: float, mode: Mode) -> None:
    """Exactly at the limit it is not: 1.25 is the quotient of 10 and 8."""
    config = replace(SERVING_GUARD, plain_every=1, plain_probe_below=1.25)
    state = LoadState(0, age=5)
    assert math.exp(math.log(10 / 8)) >= 1.25
    assert advance(state, 8 * gain, 8.0, config).mode is mode
