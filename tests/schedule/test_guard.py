"""The guard: when speculation stops, resumes and is probed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sglang_dspark.schedule.guard import (
    SERVING_GUARD,
    Guard,
    LoadState,
    Mode,
    Realised,
    advance,
    load_of,
    outlook_at,
    prior_at,
)


def run(
    guard: Guard, steps: int, predicted: float, true: float, *, noise: float, seed: int
) -> list:
    """Modes of a load where speculation is predicted `predicted`x plain and really is `true`x."""
    rng = np.random.default_rng(seed)
    modes = []
    for _ in range(steps):
        verdict = guard.decide(8, 100.0 * predicted, 100.0)
        speed = 100.0 * (true if verdict.speculate else 1.0) * np.exp(noise * rng.normal())
        theta = 100.0 * (predicted if verdict.speculate else 1.0)
        if verdict.settled:
            guard.observe(8, speculated=verdict.speculate, tokens=speed, seconds=1.0, theta=theta)
        modes.append(verdict.mode)
    return modes


def test_a_predicted_gain_that_is_a_loss_falls_back_and_stays_cheap() -> None:
    guard = Guard()
    modes = run(guard, 4000, predicted=1.2, true=0.93, noise=0.1, seed=0)
    assert guard.fallbacks >= 1
    speculated = [mode.speculates for mode in modes[500:]]
    assert np.mean(speculated) < 0.05  # probes alone; they cost 7% of so little
    assert Mode.PROBE_SPECULATE in modes[500:]  # and it keeps looking


def test_a_real_gain_is_kept_through_noise() -> None:
    guard = Guard()
    modes = run(guard, 4000, predicted=1.2, true=1.15, noise=0.2, seed=1)
    assert np.mean([mode.speculates for mode in modes]) > 0.95


def test_it_recovers_when_speculation_pays_again() -> None:
    guard = Guard(replace(SERVING_GUARD, memory=32))
    run(guard, 1000, predicted=1.2, true=0.8, noise=0.05, seed=2)
    before = guard.recoveries
    modes = run(guard, 3000, predicted=1.2, true=1.3, noise=0.05, seed=3)
    assert guard.recoveries > before
    assert all(mode.speculates or mode is Mode.PROBE_PLAIN for mode in modes[-500:])


def test_one_load_does_not_judge_another() -> None:
    guard = Guard(replace(SERVING_GUARD, visit_steps=1))
    run(guard, 500, predicted=1.2, true=0.8, noise=0.05, seed=4)
    assert not guard.state(8).mode.speculates
    assert guard.state(64).mode is Mode.SPECULATE


@pytest.mark.parametrize("users", [4, 8, 16, 32, 64])
def test_a_full_house_and_a_slot_empty_are_one_load(users: int) -> None:
    assert load_of(users) == load_of(users - 1) == load_of(users + 1)
    assert load_of(users) == load_of(2 * users) - 1
    assert [load_of(requests) for requests in (1, 2, 3)] == [0, 1, 2]


def test_a_short_visit_of_another_load_changes_nothing() -> None:
    """Eight requests pause; steps of three between them do not draft until they last."""
    guard = Guard()
    run(guard, 500, predicted=1.2, true=0.8, noise=0.05, seed=4)
    visit = 4
    for _ in range(20):
        for _ in range(visit - 1):
            assert guard.state(3).mode is Mode.PLAIN
            verdict = guard.decide(3, 150.0, 100.0)
            assert not verdict.speculate
            assert not verdict.settled
        assert guard.decide(8, 80.0, 100.0).mode is Mode.PLAIN
    stay = [guard.decide(3, 150.0, 100.0).speculate for _ in range(visit + 2)]
    assert stay == [False] * (visit - 1) + [True] * 3
    guard.decide(8, 80.0, 100.0)
    assert guard.decide(1, 150.0, 100.0).speculate  # far from eight: not one of them on its way out


def test_a_new_load_begins_with_what_its_neighbour_measured() -> None:
    """At twice the load half of the known error is believed, which is enough not to try a loss."""
    guard = Guard(replace(SERVING_GUARD, visit_steps=1))
    run(guard, 500, predicted=1.2, true=0.8, noise=0.05, seed=4)
    known = guard.state(8).speculating.quotient(8.0)
    begun = guard.state(16)
    assert begun.mode is Mode.SPECULATE
    assert begun.speculating.quotient(8.0) == pytest.approx((1 + known) / 2, abs=0.05)
    assert guard.decide(16, 100.0, 100.0).mode is Mode.PLAIN
    assert guard.decide(64, 100.0, 100.0).mode is Mode.SPECULATE
    assert guard.decide(4, 130.0, 100.0).mode is Mode.SPECULATE  # the promise still counts


def test_a_probe_of_plain_decoding_is_not_judged_by_the_prediction_it_began_with() -> None:
    """Of one request the confidences of one step say little, and a probe would repeat them."""
    guard = Guard(replace(SERVING_GUARD, plain_every=16))
    modes = []
    for _ in range(60):
        seeing = guard.state(1).mode.speculates
        verdict = guard.decide(1, 120.0 if seeing else 80.0, 100.0)
        theta = 120.0 if verdict.speculate else 100.0
        if verdict.settled:
            guard.observe(1, speculated=verdict.speculate, tokens=theta, seconds=1.0, theta=theta)
        modes.append(verdict.mode)
    assert Mode.PROBE_PLAIN in modes
    assert Mode.PLAIN not in modes


def test_a_pause_ends_when_its_predictions_rise() -> None:
    """Another number of requests of the same load, or other step times: no probe is needed."""
    guard = Guard()
    modes = run(guard, 60, predicted=0.96, true=0.96, noise=0.0, seed=10)
    assert modes[-1] is Mode.PLAIN
    steady = [guard.decide(8, 96.0, 100.0).mode for _ in range(4)]
    risen = [guard.decide(8, 110.0, 100.0).mode for _ in range(12)]
    assert Mode.SPECULATE not in steady
    assert risen[-1] is Mode.SPECULATE
    assert Mode.PROBE_SPECULATE not in risen


def test_one_hard_answer_does_not_pause_a_load_of_one_request() -> None:
    """The next answer may be easy again. With eight requests 30 such steps are the load's own."""
    modes = {}
    for requests in (1, 8):
        guard = Guard(replace(SERVING_GUARD, plain_every=1024))
        for _ in range(60):
            guard.decide(requests, 130.0, 100.0)
        modes[requests] = [guard.decide(requests, 80.0, 100.0).mode for _ in range(30)]
    assert set(modes[1]) == {Mode.SPECULATE}
    assert Mode.PLAIN in modes[8]


def test_the_promise_counts_for_longer_where_steps_say_less() -> None:
    """Nothing accepted in eight steps: chance with one request, a broken promise with eight."""
    gains = {}
    for requests in (1, 8):
        guard = Guard()
        for _ in range(10):
            verdict = guard.decide(requests, 140.0, 100.0)
            if verdict.settled:
                guard.observe(requests, speculated=True, tokens=70.0, seconds=1.0, theta=140.0)
        gains[requests] = guard.decide(requests, 140.0, 100.0).gain
    assert gains[1] > 1.15
    assert gains[8] < 1.06


def test_a_prediction_below_plain_needs_no_experience() -> None:
    guard = Guard()
    modes = [guard.decide(4, 80.0, 100.0).mode for _ in range(40)]
    assert not modes[-1].speculates


def test_a_clear_loss_is_not_even_tried() -> None:
    guard = Guard(replace(SERVING_GUARD, visit_steps=1))
    assert guard.decide(4, 90.0, 100.0).mode is Mode.PLAIN
    assert guard.decide(8, 97.0, 100.0).mode is Mode.SPECULATE  # near enough to be measured


@pytest.mark.parametrize("true", [0.85, 0.95])
def test_probes_of_a_loss_cost_half_a_percent(true: float) -> None:
    """The first trial included, over a run of a minute or two."""
    guard = Guard()
    modes = run(guard, 3000, predicted=1.1, true=true, noise=0.05, seed=6)
    lost = (1 - true) * np.mean([mode.speculates for mode in modes])
    assert lost < 0.005
    assert sum(mode is Mode.PROBE_SPECULATE for mode in modes) >= 2 * guard.config.probe


def test_what_a_change_of_ways_costs_each_request_makes_probes_rarer() -> None:
    """Eight requests at 0.03 steps each: 0.24 steps beside the 0.8 that a probe at 0.9 loses."""
    waited = {}
    for each in (0.0, 0.03):
        guard = Guard(replace(SERVING_GUARD, probe_start_cost=each))
        modes = run(guard, 200, predicted=0.9, true=0.9, noise=0.0, seed=8)
        waited[each] = modes.index(Mode.PROBE_SPECULATE)
    assert waited[0.0] == pytest.approx(80, abs=2)
    assert waited[0.03] == pytest.approx(104, abs=2)


def test_a_gain_that_stays_is_questioned_less_and_less() -> None:
    guard = Guard(replace(SERVING_GUARD, plain_every=64))
    early, late = (
        np.mean([mode is Mode.PROBE_PLAIN for mode in run(
            guard, 2000, predicted=1.2, true=1.2, noise=0.05, seed=seed
        )])
        for seed in (7, 8)
    )  # fmt: skip
    assert 0 < late < early / 1.5
    assert late * (1 - 1 / 1.2) < 0.005


def test_plain_decoding_that_proves_better_is_kept_at_once() -> None:
    """The promise for plain steps was wrong: known only from the probe, and acted on there."""
    guard = Guard(replace(SERVING_GUARD, plain_every=32))
    run(guard, 30, predicted=1.2, true=1.2, noise=0.0, seed=9)
    modes = []
    for _ in range(60):
        verdict = guard.decide(8, 120.0, 100.0)
        speed = 120.0 if verdict.speculate else 150.0  # a plain step gives more than promised
        theta = 120.0 if verdict.speculate else 100.0
        if verdict.settled:
            guard.observe(8, speculated=verdict.speculate, tokens=speed, seconds=1.0, theta=theta)
        modes.append(verdict.mode)
    after = modes[modes.index(Mode.PROBE_PLAIN) :]
    assert Mode.SPECULATE not in after[:30]
    assert Mode.PLAIN in after


def test_a_guard_that_never_stops_has_nothing_to_recover_from() -> None:
    guard = Guard()
    for _ in range(20):
        assert guard.decide(4, 300.0, 100.0).speculate
    assert (guard.fallbacks, guard.recoveries) == (0, 0)


@pytest.mark.parametrize(
    ("gain", "mode"), [(1.05, Mode.PLAIN), (1.075, Mode.PLAIN), (1.085, Mode.SPECULATE)]
)
def test_a_pause_ends_early_above_the_margin_by_the_hysteresis(gain: float, mode: Mode) -> None:
    """6% must be gained and 2% more, until the pause is over."""
    paused = LoadState(2, Mode.PLAIN, 20, 20, pause=100, predicted=math.log(gain))
    assert advance(paused, gain * 100.0, 100.0, SERVING_GUARD).mode is mode


@pytest.mark.parametrize(
    ("gain", "mode"), [(1.03, Mode.PLAIN), (1.045, Mode.PROBE_PLAIN), (1.2, Mode.PROBE_PLAIN)]
)
def test_speculation_stops_below_the_margin_by_the_hysteresis(gain: float, mode: Mode) -> None:
    """6% must be gained, less 2% once it speculates; far below 1.25 plain decoding is probed."""
    running = LoadState(2, age=20, measured=20, predicted=math.log(gain), predictions=32)
    assert advance(running, gain * 100.0, 100.0, SERVING_GUARD).mode is mode


def test_promises_count_for_eight_steps_or_24_outcomes_of_single_requests() -> None:
    assert [prior_at(load) for load in (0, 1, 2, 9)] == [24.0, 12.0, 8.0, 8.0]
    assert [outlook_at(load) for load in (0, 1, 2, 9)] == [128, 64, 32, 32]
    twice = Realised(delivered=16.0, promised=8.0, squares=32.0)
    assert LoadState(2, speculating=twice).gain(SERVING_GUARD) == pytest.approx(24 / 16)
    # A plain step is no chance: one measured counts as much as its promise.
    slow = Realised(delivered=3.0, promised=1.0, squares=9.0)
    assert LoadState(2, plain=slow).gain(SERVING_GUARD) == pytest.approx(2 / 4)


@pytest.mark.parametrize(
    ("age", "measured", "tried"),
    [(9, 3, True), (9, 2, False), (8, 8, False), (32, 2, False), (33, 2, True)],
)
def test_a_mode_is_tried_after_eight_steps_of_which_three_were_timed(
    age: int, measured: int, tried: bool
) -> None:
    """Or after four times as many, even if fewer were timed."""
    assert LoadState(2, age=age, measured=measured).tried(SERVING_GUARD) == tried


def test_a_measured_step_fades_by_one_in_128() -> None:
    guard = Guard()
    for _ in range(2):
        guard.observe(8, speculated=True, tokens=100.0, seconds=1.0, theta=100.0)
    assert guard.state(8).speculating.promised == pytest.approx(1 + 127 / 128)


def test_speculation_that_a_probe_confirms_is_trusted_for_longer_and_forgets_its_pauses() -> None:
    """As many steps as the probe's loss, 8 (1 - 1 / 1.2), is a hundredth of."""
    probing = LoadState(2, Mode.PROBE_PLAIN, 20, 20, pause=64, predicted=math.log(1.2))
    found = advance(probing, 120.0, 100.0, SERVING_GUARD)
    assert (found.mode, found.pause, found.trust) == (Mode.SPECULATE, 0, 133)


def test_the_error_of_experience_by_hand() -> None:
    """Ratios 1, 1, 2 and 2: variance 0.25, of four steps beside eight promised."""
    found = Realised(delivered=6.0, promised=4.0, squares=10.0)
    assert found.error(8.0) == pytest.approx(math.sqrt(0.25 * 4) / 12)
    assert Realised(delivered=1.9, promised=1.9, squares=4.0).error(8.0) == 0.0, "too few to tell"
