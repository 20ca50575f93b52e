"""Memory of finished steps: relay, acceptance rates, early exit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.schedule.early_exit import EarlyExit, ExitConfig
from sglang_dspark.schedule.estimator import AcceptanceEstimator, EstimatorConfig
from sglang_dspark.schedule.relay import Relay
from tests.schedule.properties import CASES, EXAMPLES

PRIOR = np.array([0.5, 0.25], np.float32)


@EXAMPLES
@given(seed=st.integers(0, 2**32 - 1), lag=st.integers(0, 3))
def test_relay_equals_a_list_of_all_writes(seed: int, lag: int) -> None:
    """Stale rows: a read is the newest old enough write of that very generation, or the prior.

    Random slots, generations and pauses; 10,000 steps or more, each a batch of reads and writes.
    """
    rng = np.random.default_rng(seed)
    relay = Relay(6, 2, lag=lag, max_age=8)
    generations = np.arange(6) + 1
    written: list[tuple[int, int, int, np.ndarray]] = []
    for step in range(max(CASES, 20)):
        gone = rng.random(6) < 0.1
        generations[gone] += 6
        rows = rng.permutation(6)[: rng.integers(0, 7)]
        values = rng.random((len(rows), 2)).astype(np.float32)
        read_first = lag > 0 or rng.random() < 0.5
        if not read_first:
            relay.publish(step, rows, generations[rows], values)
            written += [(step, r, generations[r], v) for r, v in zip(rows, values, strict=True)]
        found = relay.resolve(step, rows, generations[rows], PRIOR)
        for i, r in enumerate(rows):
            old = [
                (at, v)
                for at, row, who, v in written
                if row == r and who == generations[r] and step - 8 <= at <= step - lag
            ]
            assert found.fresh[i] == bool(old)
            expected = max(old, key=lambda entry: entry[0])[1] if old else PRIOR
            assert np.array_equal(found.confidence[i], expected)
        if read_first:
            relay.publish(step, rows, generations[rows], values)
            written += [(step, r, generations[r], v) for r, v in zip(rows, values, strict=True)]


def test_a_new_generation_never_reads_the_old_one() -> None:
    relay = Relay(4, 2)
    row, first, second = np.array([3]), np.array([1]), np.array([2])
    relay.publish(0, row, first, np.array([[0.9, 0.8]], np.float32))
    assert relay.resolve(2, row, first, PRIOR).fresh.tolist() == [True]
    assert relay.resolve(1, row, first, PRIOR).fresh.tolist() == [False]  # too early
    taken = relay.resolve(2, row, second, PRIOR)
    assert taken.fresh.tolist() == [False]
    assert np.array_equal(taken.confidence[0], PRIOR)
    never = relay.resolve(2, np.array([0]), np.array([0]), PRIOR)  # generation 0 of a fresh slot
    assert not never.fresh[0]
    assert np.array_equal(relay.unknown(2, PRIOR).confidence, np.stack([PRIOR, PRIOR]))
    with pytest.raises(ValueError, match="pool rows"):
        relay.resolve(2, np.array([4]), np.array([1]), PRIOR)


def test_a_step_that_ran_again_is_read_as_it_ran_last() -> None:
    relay, row, generation = Relay(4, 2), np.array([3]), np.array([1])
    for step, value in ((4, 0.1), (5, 0.2), (5, 0.3)):
        relay.publish(step, row, generation, np.full((1, 2), value, np.float32))
    assert relay.resolve(7, row, generation, PRIOR).confidence[0, 0] == np.float32(0.3)
    assert relay.resolve(6, row, generation, PRIOR).confidence[0, 0] == np.float32(0.1), (
        "kept as well"
    )


def test_a_confidence_is_read_two_to_sixteen_steps_later() -> None:
    relay, row, generation = Relay(4, 2), np.array([3]), np.array([1])
    relay.publish(0, row, generation, np.array([[0.9, 0.8]], np.float32))
    fresh = [step for step in range(20) if relay.resolve(step, row, generation, PRIOR).fresh[0]]
    assert fresh == list(range(2, 17))


@pytest.mark.parametrize(
    "size", [{"pool_rows": 0}, {"gamma": 0}, {"lag": -1}, {"lag": 3, "max_age": 2}]
)
def test_a_relay_of_nothing_is_refused(size: dict[str, int]) -> None:
    usual = {"pool_rows": 1, "gamma": 1, "lag": 0, "max_age": 0}
    assert Relay(**usual).gamma == 1
    with pytest.raises(ValueError, match="relay of"):
        Relay(**usual | size)


def test_ranks_with_equal_writes_read_equal() -> None:
    """Two ranks for 10,000 steps; a late copy is the same fallback on both."""
    rng = np.random.default_rng(0)
    ranks = Relay(8, 2), Relay(8, 2)
    generations = np.arange(8) + 1
    for step in range(10_000):
        generations[rng.random(8) < 0.05] += 8
        rows = np.flatnonzero(rng.random(8) < 0.7)
        late = rng.random() < 0.1
        reads = [
            r.unknown(len(rows), PRIOR) if late else r.resolve(step, rows, generations[rows], PRIOR)
            for r in ranks
        ]
        assert np.array_equal(reads[0].confidence, reads[1].confidence)
        values = rng.random((len(rows), 2)).astype(np.float32)
        for relay in ranks:
            relay.publish(step, rows, generations[rows], values)


@pytest.mark.parametrize("windows", ["full", "ragged", "mostly short"])
def test_rates_are_right_for_any_windows(windows: str) -> None:
    """Censoring: positions behind a shortened window are unknown, not failures."""
    rng = np.random.default_rng(1)
    true = np.array([0.9, 0.6, 0.3])
    estimator = AcceptanceEstimator(3, EstimatorConfig(memory=1e9))
    for _ in range(2000):
        share = {"full": [0, 0, 0, 1], "ragged": [0.25] * 4, "mostly short": [0.4, 0.4, 0.1, 0.1]}
        verified = rng.choice(4, 8, p=share[windows])
        kept = np.cumprod(rng.random((8, 3)) < true, axis=1).sum(1)
        estimator.observe(np.minimum(kept, verified), verified)
    assert estimator.prior() == pytest.approx(true, abs=0.04)


def test_rates_follow_a_shift() -> None:
    estimator = AcceptanceEstimator(2)
    for _ in range(60):
        estimator.observe(np.array([2, 2]), np.array([2, 2]))
    assert estimator.prior()[0] > 0.8
    for _ in range(600):
        estimator.observe(np.array([0, 0]), np.array([2, 2]))
    assert estimator.prior()[0] < 0.25
    known = estimator.prior()
    for accepted, verified in ((2, 1), (-1, 1), (0, 3)):
        with pytest.raises(ValueError, match="accepted"):
            estimator.observe(np.array([0, accepted]), np.array([1, verified]))
    assert np.array_equal(estimator.prior(), known)


def test_early_exit_needs_a_broken_promise() -> None:
    """A run of failures that confidence foretold changes nothing; one that it denied rests."""
    exit_ = EarlyExit(3, 4, ExitConfig(first_rest=4, longest_rest=8))
    rows, generations = np.arange(3), np.array([1, 2, 3])
    sure = np.array([0.9, 0.05, 0.9], np.float32)
    for step in range(5):
        assert exit_.limits(step, rows, generations).tolist() == [4, 4, 4]
        exit_.observe(step, rows, generations, np.array([0, 0, 1]), np.array([1, 1, 1]), sure)
    resting = exit_.limits(5, rows, generations).tolist()
    assert resting == [0, 4, 4]
    assert exit_.resting(5, rows, generations) == 1
    assert exit_.limits(5, rows, np.array([9, 2, 3]))[0] == 4  # another generation starts clean
    assert exit_.limits(9, rows, generations)[0] == 4  # one more try
    exit_.observe(9, rows[:1], generations[:1], np.array([0]), np.array([1]), sure[:1])
    assert exit_.limits(17, rows, generations)[0] == 0  # twice as long
    assert exit_.limits(18, rows, generations)[0] == 4
    exit_.observe(18, rows[:1], generations[:1], np.array([1]), np.array([1]), sure[:1])
    assert exit_.limits(19, rows, generations)[0] == 4


def test_counts_fade_by_what_was_reached() -> None:
    """By hand: each position leans on the one in front of it, the first on the start."""
    config = EstimatorConfig(memory=10.0, start=0.6, start_strength=2.0)
    estimator = AcceptanceEstimator(2, config)
    reached, accepted = np.zeros(2), np.zeros(2)
    for kept, verified in ((2, 2), (0, 2), (1, 1), (0, 0), (1, 2)):
        met = np.array([k < verified and k <= kept for k in range(2)], np.float64)
        fade = np.exp(-met / 10)
        reached = reached * fade + met
        accepted = accepted * fade + met * (np.arange(2) < kept)
        estimator.observe(np.array([kept]), np.array([verified]))
    first = (accepted[0] + 2 * 0.6) / (reached[0] + 2)
    second = (accepted[1] + 2 * first) / (reached[1] + 2)
    assert estimator.prior() == pytest.approx([first, second], abs=1e-6)


def test_each_rest_is_twice_the_one_before_up_to_the_longest() -> None:
    exit_ = EarlyExit(1, 2, ExitConfig(surprise=0.5, first_rest=3, longest_rest=20))
    row, generation, one = np.array([0]), np.array([5]), np.ones(1, np.int64)
    step, rests = 0, []
    for _ in range(5):
        exit_.observe(step, row, generation, 0 * one, one, np.array([0.9], np.float32))
        begin = step + 1
        while exit_.limits(begin, row, generation)[0] == 0:
            begin += 1
        rests.append(begin - step - 1)
        step = begin
    assert rests == [3, 6, 12, 20, 20]
