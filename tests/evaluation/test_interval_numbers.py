"""Bootstrap intervals against the exact distribution of resamples: 95%, not 90% or 99%.

Half of n prompts have the value 0, half the value 1. The mean of a resample is B(n, 1/2) / n.
P(B(8, 1/2) <= 1) = 9/256 = 3.5%: a 95% interval is 1/8..7/8, a 90% one would be 2/8..6/8.
P(B(10, 1/2) <= 1) = 11/1024 = 1.1%: a 95% interval is 2/10..8/10, a 99% one would be 1/10..9/10.
"""

from __future__ import annotations

import numpy as np
import pytest

from sglang_dspark.evaluation.analyses.overhead import _bounded
from sglang_dspark.evaluation.analyses.predictions import Predictions
from sglang_dspark.evaluation.resampling import MACRO, Resampler, estimate
from sglang_dspark.evaluation.statistics import RequestCounts, acceptance, bootstrap_ratio

LOW = {8: 1 / 8, 10: 2 / 10}  # lower end by number of prompts; the upper end is 1 - low


def halves(n: int) -> np.ndarray:
    """[n] values, 0 and 1 in turn."""
    return np.arange(n) % 2.0


@pytest.mark.parametrize(("n", "low"), LOW.items())
def test_the_interval_of_a_ratio(n: int, low: float) -> None:
    assert bootstrap_ratio(halves(n), np.ones(n)) == pytest.approx((low, 1 - low))


@pytest.mark.parametrize(("n", "low"), LOW.items())
def test_the_interval_of_tau(n: int, low: float) -> None:
    """A request has one step, which accepts no draft or one."""
    found = acceptance([RequestCounts(2, (1, 0) if value else (0, 1)) for value in halves(n)])
    assert (found.tau_low, found.tau, found.tau_high) == pytest.approx((1 + low, 1.5, 2 - low))


@pytest.mark.parametrize(("n", "low"), LOW.items())
def test_the_interval_of_a_resampled_domain(n: int, low: float) -> None:
    """In the second of two domains; prompts of both in turn. All of the first have the value 3."""
    domains = ["one", "two"] * n
    values = np.stack([np.full(n, 3.0), halves(n)], 1).ravel()
    drawn = Resampler(domains).ratios(values, np.ones(2 * n))
    constant, found, macro = (estimate(drawn[name]) for name in ("one", "two", MACRO))
    assert (constant.low, constant.value, constant.high) == (3.0, 3.0, 3.0)
    assert (found.low, found.value, found.high) == pytest.approx((low, 0.5, 1 - low))
    assert (macro.low, macro.high) == pytest.approx(((3 + found.low) / 2, (3 + found.high) / 2))


def test_the_interval_of_draws() -> None:
    """40 equal gaps: 2.5% of them is one. The sample's own value is no draw."""
    found = estimate(np.array([99.0, *range(40, -1, -1)]))
    assert (found.value, found.low, found.high) == (99.0, 1.0, 39.0)
    some = estimate(np.array([99.0, np.nan, *range(41), np.nan]))
    assert (some.low, some.high) == (1.0, 39.0)


@pytest.mark.parametrize(("n", "low"), LOW.items())
def test_the_intervals_of_a_calibration_plot(n: int, low: float) -> None:
    """Each request has one draft, predicted as certain to fail: the ECE is the share accepted."""
    certain = Predictions(np.zeros(n), halves(n), np.ones(n, np.int64), np.arange(n))
    (only,) = certain.curve()
    assert (only.low, only.accepted, only.high) == pytest.approx((low, 0.5, 1 - low))
    error = certain.calibration()
    assert (error.low, error.value, error.high) == pytest.approx((low, 0.5, 1 - low))


def test_the_interval_of_a_median_share() -> None:
    """Nine pairs, shares 0.1..0.9. P(median <= 0.2) = P(B(9, 2/9) >= 5) = 3.0%, so a 95% interval
    begins at 0.2; P(median <= 0.1) = 0.1%. A 90% interval would begin at 0.3."""
    found = _bounded(np.arange(9.0, 0.0, -1.0), np.full(9, 10.0))
    assert (found.round_s, found.loop_s, found.share) == pytest.approx((10.0, 5.0, 0.5))
    assert (found.share_low, found.share_high) == pytest.approx((0.2, 0.8))
