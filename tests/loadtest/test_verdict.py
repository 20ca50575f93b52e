"""Verdicts that refuse a winner without evidence, and arms that take turns."""

from __future__ import annotations

from sglang_dspark.intervals import paired_ratio
from sglang_dspark.loadtest.sweep.verdict import arm_order, verdict


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


def test_arms_take_turns_evenly() -> None:
    arms = ["plain", "mtp1", "dspark"]
    orders = [arm_order(arms, trial) for trial in range(2 * len(arms))]
    for arm in arms:
        assert sorted(order.index(arm) for order in orders) == [0, 0, 1, 1, 2, 2]
        for other in set(arms) - {arm}:
            assert sum(order.index(arm) < order.index(other) for order in orders) == len(arms)
    assert orders[0] == orders[1][::-1]  # also the first two trials alternate
