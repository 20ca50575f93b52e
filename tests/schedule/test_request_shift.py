"""Requests' own shifts: rows, tenants, and what counts as an outcome."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_dspark.schedule.request_shift import LIMIT, RequestShift

HALF = np.full((1, 3), 0.5)


def _one(value: int) -> np.ndarray:
    return np.array([value], dtype=np.int64)


def test_success_raises_and_failure_lowers_and_chance_averages_out() -> None:
    found = RequestShift(0.5, rows=2)
    rows = np.array([0, 1])
    found.observe(rows, rows, np.full((2, 3), 0.5), np.array([3, 0]), np.array([3, 3]))
    up, down = found.shifts(rows, rows)
    assert up == pytest.approx(1.5 / (2 + 0.75))  # three successes, each 0.5 above the prediction
    assert down == pytest.approx(-0.5 / (2 + 0.25))  # one failure; what is behind it says nothing


def test_a_new_tenant_starts_anew() -> None:
    found = RequestShift(0.5, rows=1)
    found.observe(_one(0), _one(7), HALF, _one(3), _one(3))
    assert found.shifts(_one(0), _one(7))[0] > 0
    assert found.shifts(_one(0), _one(8))[0] == 0
    found.observe(_one(0), _one(8), HALF, _one(0), _one(3))
    assert found.shifts(_one(0), _one(8))[0] == pytest.approx(-0.5 / 2.25)


def test_censored_drafts_and_no_spread_change_nothing() -> None:
    found = RequestShift(0.5, rows=1)
    found.observe(_one(0), _one(1), HALF, _one(0), _one(0))
    assert found.shifts(_one(0), _one(1))[0] == 0
    still = RequestShift(0.0, rows=1)
    still.observe(_one(0), _one(1), HALF, _one(3), _one(3))
    assert still.shifts(_one(0), _one(1))[0] == 0


def test_shift_is_bounded_and_a_spread_must_be_a_variance() -> None:
    found = RequestShift(1e6, rows=1)
    for _ in range(20):
        found.observe(_one(0), _one(1), np.full((1, 3), 0.01), _one(3), _one(3))
    assert found.shifts(_one(0), _one(1))[0] == LIMIT
    for wrong in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="variance"):
            RequestShift(wrong, rows=1)
