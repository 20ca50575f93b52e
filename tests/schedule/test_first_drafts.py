"""First drafts: the interval, the windows, who is found not to fit and who never is."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom

from sglang_dspark.schedule.first_drafts import (
    DOUBT,
    EXAMINE_EVERY,
    FIRST_REST,
    FITTING,
    LEAST,
    LEAST_TO_STOP,
    LONGEST_REST,
    LOOK,
    MOST_OF_ONE,
    WINDOW,
    Finding,
    FirstDrafts,
    upper_bound,
)

SLOTS = 8
LOOKS = range(LEAST, WINDOW + 1, LOOK)


class Traffic:
    """Requests of 30 drafts each, four at a time, with one chance of acceptance."""

    def __init__(self, minimum: float | None = None) -> None:
        self.drafts = FirstDrafts(SLOTS, minimum)
        self.generations = np.arange(100, 100 + SLOTS)
        self.random = np.random.default_rng(0)
        self.steps = count()

    def step(self, rate: float, gamma: int = 3) -> Finding | None:
        if next(self.steps) % 30 == 29:
            self.generations += SLOTS
        rows = np.array([1, 3, 4, 6])
        accepted = np.where(self.random.random(4) < rate, self.random.integers(1, gamma + 1, 4), 0)
        verified = np.full(4, gamma)
        return self.drafts.observe(rows, self.generations[rows], accepted, verified)

    def until_found(self, rate: float) -> Finding:
        return next(filter(None, (self.step(rate) for _ in range(50_000))))

    def until_stopped(self, rate: float) -> Finding:
        return next(each for _ in range(200) if (each := self.until_found(rate)).stops)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_bound_is_where_the_score_test_changes_its_mind(outcome: tuple[int, int]) -> None:
    """Wilson's interval has the rates p with |accepted / n - p| <= z sqrt(p (1 - p) / n)."""
    accepted, n = outcome
    upper, rate = upper_bound(accepted, n), accepted / n
    assert rate - 1e-12 <= upper <= 1
    if accepted < n:
        score = lambda p: p - rate - DOUBT * np.sqrt(p * (1 - p) / n)  # noqa: E731
        assert upper == pytest.approx(brentq(score, rate + 1e-12, 1.0), abs=1e-6)


@given(st.integers(1, 2000), st.data())
def test_the_bound_grows_with_acceptance_and_narrows_with_outcomes(
    n: int, data: st.DataObject
) -> None:
    accepted = data.draw(st.integers(0, n - 1))
    assert upper_bound(accepted, n) < upper_bound(accepted + 1, n) <= 1
    assert upper_bound(2 * accepted, 2 * n) < upper_bound(accepted, n)
    assert upper_bound(0, 0) == 1


def most_found(n: int, limit: float) -> int:
    """Most accepted of n that are beyond doubt below the limit; -1: not even none."""
    return max((k for k in range(n + 1) if upper_bound(k, n) < limit), default=-1)


@pytest.mark.parametrize("n", LOOKS)
def test_a_look_seldom_finds_a_drafter_on_the_limit_and_never_one_that_fits(n: int) -> None:
    """By the binomial distribution itself."""
    most = most_found(n, FITTING)
    assert most >= 0, "zero accepted is enough at each look"
    assert binom.cdf(most, n, FITTING) < 5e-3
    assert binom.cdf(most, n, 0.3) < 1e-9  # the weakest of 2,000 training steps
    assert binom.cdf(most, n, 0.002) > 0.85


@pytest.mark.parametrize("rate", [0.0, 0.005, 0.03])
def test_a_drafter_that_rarely_guesses_is_found(rate: float) -> None:
    traffic = Traffic()
    found = traffic.until_found(rate)
    while not found.below:
        found = traffic.until_found(rate)
    assert not found.stops, "without a minimum nothing stops"
    assert found.accepted / found.verified < FITTING
    if rate == 0:
        assert found == (0, LEAST, True, False)


@pytest.mark.parametrize("rate", [0.15, 0.29, 0.6, 1.0])
def test_one_that_guesses_is_never_found(rate: float) -> None:
    traffic = Traffic(minimum=0.12 if rate > 0.2 else None)
    found = [each for _ in range(8000) if (each := traffic.step(rate))]
    assert len(found) >= 20
    assert not any(each.below or each.stops for each in found)
    assert {each.verified for each in found} == {WINDOW}


def test_few_failures_stop_nothing() -> None:
    """They are found not to fit long before that."""
    traffic = Traffic(minimum=0.9)
    for _ in range(LEAST_TO_STOP // 4 - 1):
        found = traffic.step(0.0)
        assert found is None or (found.below and not found.stops)
    assert not traffic.drafts.rests()
    assert traffic.step(0.0) == (0, LEAST_TO_STOP, True, True)


def test_one_request_alone_is_no_evidence() -> None:
    drafts = FirstDrafts(SLOTS, minimum=0.9)
    one, ones = np.ones(1, np.int64), np.zeros(1, np.int64)
    for _ in range(4000):
        assert drafts.observe(one, one, ones, one) is None
    for _ in range(LEAST - MOST_OF_ONE - 1):
        assert drafts.observe(one, 2 * one, ones, one) is None
    assert drafts.observe(one, 3 * one, ones, one) == (0, LEAST, True, False)


def test_steps_and_requests_without_a_verified_draft_are_not_counted() -> None:
    traffic = Traffic()
    rows, none = np.array([1, 3, 4, 6]), np.zeros(4, np.int64)
    for _ in range(2000):
        assert traffic.drafts.observe(rows, traffic.generations[rows], none, none) is None
    half = np.array([3, 0, 3, 0])
    found, steps = None, 0
    while found is None:
        traffic.generations += SLOTS
        steps += 1
        found = traffic.drafts.observe(rows, traffic.generations[rows], np.minimum(half, 1), half)
    assert (found.accepted, found.verified) == (WINDOW, WINDOW)
    assert steps == WINDOW // 2


def test_how_far_a_draft_is_accepted_makes_no_difference() -> None:
    deep, shallow = (Traffic() for _ in range(2))
    for _ in range(1000):
        assert deep.step(0.5, gamma=7) == shallow.step(0.5, gamma=7)
    found = Traffic().until_found(1.0)
    assert found.accepted == found.verified == WINDOW


@given(st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), min_size=1, max_size=4))
@settings(max_examples=20)
def test_a_window_forgets_what_was_before_it(rates: list[float]) -> None:
    """After any traffic, a window of drafts that fail is found, and one that fits is cleared."""
    traffic = Traffic()
    for rate in rates:
        traffic.until_found(rate)
    for rate, below in ((0.0, True), (1.0, False)):
        while (last := traffic.until_found(rate)).verified < WINDOW:
            pass
        while (last := traffic.until_found(rate)).verified < WINDOW:
            pass
        assert last.below is below


def test_drafting_rests_longer_each_time_and_anew_after_a_good_window() -> None:
    traffic = Traffic(minimum=0.4)

    def rest() -> int:
        assert traffic.until_stopped(0.0).verified == LEAST_TO_STOP
        steps = 0
        while traffic.drafts.rests():
            steps += 1
        return steps

    rests = [rest() for _ in range(7)]
    assert rests[:5] == [FIRST_REST * 2**n for n in range(5)]
    assert rests[-1] == LONGEST_REST
    assert not traffic.until_found(0.9).below
    assert rest() == FIRST_REST
    traffic.until_stopped(0.0)
    traffic.drafts.renew()
    assert not traffic.drafts.rests()
    assert rest() == FIRST_REST


def test_below_a_minimum_but_fitting() -> None:
    traffic = Traffic(minimum=0.5)
    found = traffic.until_found(0.25)
    assert found.stops
    assert not found.below
    assert found.verified >= LEAST_TO_STOP
    assert traffic.drafts.rests()
    other = Traffic()
    other.until_found(0.25)
    assert not other.drafts.rests()


def test_new_weights_begin_a_window() -> None:
    traffic = Traffic()
    for _ in range(LEAST // 4 - 1):
        assert traffic.step(0.0) is None
    traffic.drafts.renew()
    found = [traffic.step(0.0) for _ in range(LEAST // 4)]
    assert found == [None] * (LEAST // 4 - 1) + [(0, LEAST, True, False)]


def test_until_its_first_look_it_examines() -> None:
    traffic = Traffic()
    for _ in range(2):
        examined = [traffic.drafts.examines() for _ in range(4 * EXAMINE_EVERY)]
        assert [n for n, each in enumerate(examined) if each] == [7, 15, 23, 31]
        for _ in range(LEAST // 4):
            traffic.step(0.5)
        assert not any(traffic.drafts.examines() for _ in range(4 * EXAMINE_EVERY))
        traffic.drafts.renew()


def test_long_requests_count_in_each_window() -> None:
    requests = WINDOW // MOST_OF_ONE
    drafts, rows = FirstDrafts(requests), np.arange(requests)
    ones = np.ones(requests, np.int64)
    found = [drafts.observe(rows, ones, ones, ones) for _ in range(3 * MOST_OF_ONE)]
    assert [each for each in found if each] == [(WINDOW, WINDOW, False, False)] * 3
