"""The interval of a paired ratio holds what it promises, at any number of trials."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_dspark.errors import DSparkError
from sglang_dspark.intervals import METHOD, Ratio, paired_ratio

Floats = NDArray[np.float64]
Bounds = Callable[[Floats, Floats], tuple[float, float]]
WORLDS, TRUTH = 6000, 1.2
BAND = (0.94, 0.96)  # with 6,000 worlds 95% has a standard error of 0.3%


def covered(bounds: Bounds, trials: int) -> float:
    """Share of worlds whose interval holds the true ratio. Pairs are log-normal: both sides share
    a trial's speed, and each has noise of its own."""
    generator = np.random.default_rng(trials)
    machine = np.exp(generator.normal(0, 0.2, (WORLDS, trials)))
    ours = TRUTH * machine * np.exp(generator.normal(0, 0.07, (WORLDS, trials)))
    theirs = machine * np.exp(generator.normal(0, 0.04, (WORLDS, trials)))
    held = 0
    for over, under in zip(ours, theirs, strict=True):
        low, high = bounds(over, under)
        held += low <= TRUTH <= high
    return held / WORLDS


def ours(over: Floats, under: Floats) -> tuple[float, float]:
    found = paired_ratio(over.tolist(), under.tolist())
    return found.low, found.high


def percentile_bootstrap(over: Floats, under: Floats) -> tuple[float, float]:
    """Return the rejected alternative: the middle 95% of the mean over resampled trials."""
    logs = np.log(over / under)
    picks = np.random.default_rng(0).integers(0, len(logs), size=(400, len(logs)))
    low, high = np.exp(np.quantile(logs[picks].mean(axis=1), [0.025, 0.975]))
    return float(low), float(high)


@pytest.mark.parametrize("trials", [3, 5, 8, 12])
def test_the_interval_covers_the_truth(trials: int) -> None:
    assert BAND[0] <= covered(ours, trials) <= BAND[1]


def test_a_percentile_bootstrap_of_eight_would_not() -> None:
    assert covered(percentile_bootstrap, 8) < 0.90


def test_common_noise_cancels_in_pairs() -> None:
    machine = np.array([1.0, 0.5, 2.0])  # a busy and a calm trial
    ratio = paired_ratio((130 * machine).tolist(), (100 * machine).tolist())
    assert (ratio.low, ratio.mid, ratio.high) == pytest.approx((1.3, 1.3, 1.3))
    assert (ratio.winner, ratio.method) == ("over", METHOD)
    assert paired_ratio([1, 2, 3], [2, 4, 6]).winner == "under"


def test_equal_arms_seldom_have_a_winner() -> None:
    generator = np.random.default_rng(1)
    noise = np.exp(generator.normal(0, 0.05, (400, 2, 3)))
    named = sum(paired_ratio(a.tolist(), b.tolist()).winner != "" for a, b in noise)
    assert named / 400 < 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)


def test_the_interval_of_three_by_hand() -> None:
    """Logs -h, 0, h: mean 0, standard error h / sqrt(3), 97.5% quantile 4.302653."""
    ratio = paired_ratio([0.9, 1.0, 1 / 0.9], [1, 1, 1])
    assert math.log(ratio.high) == pytest.approx(4.302653 * -math.log(0.9) / math.sqrt(3), rel=1e-6)
    assert ratio.low * ratio.high == pytest.approx(1.0)
    assert ratio.bounds == [ratio.low, ratio.high]


@pytest.mark.parametrize(
    ("trials", "quantile"), [(3, 4.302653), (4, 3.182446), (5, 2.776445), (11, 2.228139)]
)
def test_the_interval_by_the_t_table(trials: int, quantile: float) -> None:
    """One log ratio of 1, the others 0: mean 1 / n and standard error 1 / n. The quantiles are
    those of 97.5% in a printed table, of n - 1 degrees of freedom."""
    ratio = paired_ratio([math.e, *[1.0] * (trials - 1)], [1.0] * trials)
    assert math.log(ratio.mid) == pytest.approx(1 / trials)
    assert math.log(ratio.high) == pytest.approx((1 + quantile) / trials, rel=1e-6)
    assert math.log(ratio.low) == pytest.approx((1 - quantile) / trials, rel=1e-6)


def test_an_interval_that_ends_at_one_has_no_winner() -> None:
    tied = paired_ratio([3.0, 5.0, 7.0], [3.0, 5.0, 7.0])
    assert (tied.low, tied.mid, tied.high, tied.winner) == (1.0, 1.0, 1.0, "")
    assert Ratio(1.0, 1.1, 1.2, 3, METHOD).winner == ""
    assert Ratio(0.8, 0.9, 1.0, 3, METHOD).winner == ""


def test_two_trials_have_no_interval() -> None:
    few = paired_ratio([2, 2], [1, 1])
    assert (few.low, few.mid, few.high) == (0.0, pytest.approx(2.0), math.inf)
    assert few.winner == ""
    assert few.bounds is None


@pytest.mark.parametrize(
    ("over", "under"), [([1], []), ([], []), ([1, 0], [1, 1]), ([1, float("nan")], [1, 1])]
)
def test_what_cannot_be_paired_is_refused(over: list[float], under: list[float]) -> None:
    with pytest.raises(DSparkError):
        paired_ratio(over, under)
