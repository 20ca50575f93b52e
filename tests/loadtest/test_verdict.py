"""Intervals that hold what they promise, and verdicts that refuse a winner without evidence."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.verdict import arm_order, paired_ratio, tight_enough, verdict


def test_common_noise_cancels_in_pairs() -> None:
    machine = np.array([1.0, 0.5, 2.0])  # a busy and a calm trial
    ratio = paired_ratio((130 * machine).tolist(), (100 * machine).tolist())
    assert (ratio.low, ratio.mid, ratio.high) == pytest.approx((1.3, 1.3, 1.3))
    assert ratio.winner == "over"
    assert paired_ratio([1, 2, 3], [2, 4, 6]).winner == "under"


@pytest.mark.parametrize(("trials", "least"), [(3, 0.935), (5, 0.935), (12, 0.88)])
def test_the_interval_covers_the_truth(trials: int, least: float) -> None:
    generator = np.random.default_rng(0)
    worlds = 400
    held = 0
    for _ in range(worlds):
        noise = generator.normal(0, 0.05, (2, trials))
        ours, theirs = 1.2 * np.exp(noise[0]), np.exp(noise[1])
        ratio = paired_ratio(ours.tolist(), theirs.tolist())
        held += ratio.low <= 1.2 <= ratio.high
    assert held / worlds >= least - 2 * math.sqrt(least * (1 - least) / worlds)


def test_equal_arms_seldom_have_a_winner() -> None:
    generator = np.random.default_rng(1)
    noise = np.exp(generator.normal(0, 0.05, (400, 2, 3)))
    named = sum(paired_ratio(a.tolist(), b.tolist()).winner != "" for a, b in noise)
    assert named / 400 < 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)


def test_the_same_trials_give_the_same_interval() -> None:
    ours = np.random.default_rng(2).uniform(1, 2, 10).tolist()
    assert paired_ratio(ours, [1.0] * 10) == paired_ratio(ours, [1.0] * 10)
    assert paired_ratio(ours, [1.0] * 10).method == "paired bootstrap"


def test_the_verdict_refuses_what_it_cannot_tell() -> None:
    few = paired_ratio([2, 2], [1, 1])
    assert few.winner == ""
    assert "too few to tell" in verdict("dspark", "mtp1", "throughput", few)
    open_ = paired_ratio([1.0, 1.3, 0.9], [1, 1, 1])
    assert open_.winner == ""
    sentence = verdict("dspark", "mtp1", "speed", open_)
    assert sentence.startswith("No winner")
    assert "contains 1" in sentence
    won = paired_ratio([1.30, 1.31, 1.32], [1, 1, 1])
    assert verdict("dspark", "mtp1", "speed", won).startswith("dspark beats mtp1 in speed: 1.31x")
    lost = paired_ratio([0.80, 0.81, 0.82], [1, 1, 1])
    assert verdict("dspark", "mtp1", "speed", lost).startswith("dspark is behind mtp1")


@pytest.mark.parametrize(
    ("over", "under"), [([1], []), ([], []), ([1, 0], [1, 1]), ([1, float("nan")], [1, 1])]
)
def test_what_cannot_be_paired_is_refused(over: list[float], under: list[float]) -> None:
    with pytest.raises(DSparkError):
        paired_ratio(over, under)


def test_arms_take_turns_evenly() -> None:
    arms = ["plain", "mtp1", "dspark"]
    orders = [arm_order(arms, trial) for trial in range(2 * len(arms))]
    for arm in arms:
        assert sorted(order.index(arm) for order in orders) == [0, 0, 1, 1, 2, 2]
        for other in set(arms) - {arm}:
            assert sum(order.index(arm) < order.index(other) for order in orders) == len(arms)
    assert orders[0] == orders[1][::-1]  # also the first two trials alternate


def test_enough_is_judged_by_the_width() -> None:
    ratio = paired_ratio([1.30, 1.31, 1.32], [1, 1, 1])
    assert tight_enough(ratio, 0.1)
    assert not tight_enough(ratio, 0.001)
    assert not tight_enough(paired_ratio([2, 2], [1, 1]), 0.5)
