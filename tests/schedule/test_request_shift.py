"""Requests' own shifts: rows, generations, regimes, and what counts as an outcome."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_dspark.schedule.request_shift import LIMIT, SPREADS, RequestShift

HALF = np.full((1, 3), 0.5)
FOR_EVER = 1e12  # steps: a memory that forgets nothing


def _one(value: int) -> np.ndarray:
    return np.array([value], dtype=np.int64)


def observe(
    found: RequestShift,
    generation: int,
    accepted: int,
    verified: int,
    confidence: np.ndarray = HALF,
) -> None:
    """An outcome of the request in row 0, regime 0."""
    none = np.zeros(1, np.int64)
    found.observe(none, _one(generation), none, confidence, _one(accepted), _one(verified))


def shift(found: RequestShift, generation: int) -> float:
    return float(found.shifts(_one(0), _one(generation))[0])


def test_success_raises_and_failure_lowers_and_chance_averages_out() -> None:
    found = RequestShift([0.5], rows=2, memory=FOR_EVER)
    rows, regimes = np.array([0, 1]), np.zeros(2, np.int64)
    three = np.array([3, 3])
    found.observe(rows, rows, regimes, np.full((2, 3), 0.5), np.array([3, 0]), three)
    up, down = found.shifts(rows, rows)
    assert up == pytest.approx(1.5 / (2 + 0.75))  # three successes, each 0.5 above the prediction
    assert down == pytest.approx(-0.5 / (2 + 0.25))  # one failure; what is behind it says nothing


def test_a_new_generation_starts_anew() -> None:
    found = RequestShift([0.5], rows=1, memory=FOR_EVER)
    observe(found, generation=7, accepted=3, verified=3)
    assert shift(found, 7) > 0
    assert shift(found, 8) == 0
    observe(found, generation=8, accepted=0, verified=3)
    assert shift(found, 8) == pytest.approx(-0.5 / 2.25)


def test_censored_drafts_and_no_spread_change_nothing() -> None:
    found = RequestShift([0.5], rows=1)
    observe(found, generation=1, accepted=0, verified=0)
    assert shift(found, 1) == 0
    still = RequestShift([0.0], rows=1)
    observe(still, generation=1, accepted=3, verified=3)
    assert shift(still, 1) == 0


def test_a_request_strays_as_far_as_its_regime_allows() -> None:
    found = RequestShift([0.0, 0.1, 1.0], rows=3)
    rows = np.arange(3)
    found.observe(rows, rows, rows, np.full((3, 2), 0.5), rows * 0 + 2, rows * 0 + 2)
    still, little, much = found.shifts(rows, rows)
    assert 0 == still < little < much


def test_steps_without_a_verified_draft_forget() -> None:
    found = RequestShift([0.5], rows=1, memory=10)
    for _ in range(20):
        observe(found, generation=1, accepted=3, verified=3)
    high = shift(found, 1)
    assert high > 0.5
    for _ in range(10):
        observe(found, generation=1, accepted=0, verified=0)
    assert shift(found, 1) == pytest.approx(high / np.e)
    for _ in range(100):
        observe(found, generation=1, accepted=0, verified=0)
    observe(found, generation=1, accepted=3, verified=3)  # as one of whom nothing is known
    fresh = RequestShift([0.5], rows=1, memory=10)
    observe(fresh, generation=1, accepted=3, verified=3)
    assert shift(found, 1) == pytest.approx(shift(fresh, 1), rel=1e-3)


def test_it_finds_how_far_a_request_strays() -> None:
    """Steady-state mean of many requests with one true shift, their outcomes drawn from it."""
    rng = np.random.default_rng(0)
    rows = np.arange(400)
    found = RequestShift([0.3], rows=400)
    chance = 1 / (1 + np.exp(-0.6))
    for _ in range(80):
        said = 1 / (1 + np.exp(-np.tile(found.shifts(rows, rows)[:, None], (1, 4))))
        accepted = np.cumprod(rng.random((400, 4)) < chance, axis=1).sum(1)
        found.observe(rows, rows, rows * 0, said, accepted, rows * 0 + 4)
    assert found.shifts(rows, rows).mean() == pytest.approx(0.6, abs=0.1)


def test_shift_is_bounded_and_settings_must_make_sense() -> None:
    found = RequestShift([1e6], rows=1, memory=FOR_EVER)
    for _ in range(20):
        observe(found, generation=1, accepted=3, verified=3, confidence=np.full((1, 3), 0.01))
    assert shift(found, 1) == pytest.approx(LIMIT)
    for wrong in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="variance"):
            RequestShift([wrong], rows=1)
    for memory in (0.5, float("nan")):
        with pytest.raises(ValueError, match="memory"):
            RequestShift([0.1], rows=1, memory=memory)


def test_no_request_is_further_than_three_logits_from_the_average() -> None:
    for accepted, verified, limit in ((3, 3, 3.0), (0, 3, -3.0)):
        found = RequestShift([0.8], rows=1, memory=FOR_EVER)
        for _ in range(400):
            observe(found, 0, accepted, verified)
        assert shift(found, 0) == pytest.approx(limit)


def test_spreads_are_tried_in_ascending_order_from_none() -> None:
    assert SPREADS[0] == 0.0
    assert list(SPREADS) == sorted(set(SPREADS))
