"""Online calibration: follows a change of traffic, right under censoring, bounded."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_dspark.schedule.calibration import Calibration
from sglang_dspark.schedule.online import (
    BINS,
    LONG_MEMORY,
    OnlineCalibration,
    OnlineConfig,
    _bin_survivals,
)

GAMMA, REQUESTS = 5, 8
Floats = NDArray[np.float64]


class Traffic:
    """Blocks whose drafts are accepted with chance sigmoid((logit + shift) / temperature)."""

    def __init__(self, mean: float, shift: float, temperature: float, seed: int) -> None:
        self.mean, self.shift, self.temperature = mean, shift, temperature
        self.rng = np.random.default_rng(seed)

    def logits(self) -> NDArray[np.float32]:
        """[R, gamma], of varying difficulty."""
        hard = self.rng.normal(self.mean, 1.5, (REQUESTS, 1))
        return (hard + self.rng.normal(0, 1, (REQUESTS, GAMMA))).astype(np.float32)

    def chance(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        return 1 / (1 + np.exp(-(logits.astype(np.float64) + self.shift) / self.temperature))

    def accepted(
        self, logits: NDArray[np.float32], verified: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        kept = self.rng.random(logits.shape) < self.chance(logits)
        return np.minimum(np.cumprod(kept, axis=1).sum(1), verified)


CODE = dict(mean=1.5, shift=0.0, temperature=1.0)
CHAT = dict(mean=0.5, shift=-1.2, temperature=1.6)


def run(calibration: OnlineCalibration, traffic: Traffic, steps: int, depth: int = GAMMA) -> None:
    greedy = np.zeros(REQUESTS, np.int64)
    for _ in range(steps):
        logits = traffic.logits()
        verified = traffic.rng.integers(0, depth + 1, REQUESTS)
        calibration.observe(logits, greedy, traffic.accepted(logits, verified), verified)


def survival_error(calibration: OnlineCalibration, traffic: Traffic) -> float:
    """ECE of the survivals a_k over ten bins, against the true chances: free of label noise."""
    said, true = [], []
    for _ in range(400):
        logits = traffic.logits()
        out = np.empty((REQUESTS, GAMMA), np.float32)
        calibration.confidence(logits, np.zeros(REQUESTS, np.int64), out)
        said.append(np.cumprod(out.astype(np.float64), axis=1).ravel())
        true.append(np.cumprod(traffic.chance(logits), axis=1).ravel())
    a, b = np.concatenate(said), np.concatenate(true)
    place = np.minimum((a * 10).astype(int), 9)
    return float(np.abs(np.bincount(place, a - b, 10)).sum() / len(a))


@pytest.mark.parametrize("seed", range(4))
def test_a_change_of_traffic_is_followed_within_500_steps(seed: int) -> None:
    calibration = OnlineCalibration([Calibration.identity(GAMMA)])
    run(calibration, Traffic(**CODE, seed=seed), 1500)
    chat = Traffic(**CHAT, seed=100 + seed)
    assert survival_error(calibration, chat) > 0.08  # the change matters
    run(calibration, chat, 500)
    assert survival_error(calibration, chat) < 0.03


def test_short_windows_bias_nothing() -> None:
    """Only the first two drafts are ever verified: their calibration is right, others untouched."""
    calibration = OnlineCalibration([Calibration.identity(GAMMA)])
    chat = Traffic(**CHAT, seed=1)
    run(calibration, chat, 1500, depth=2)
    temperatures, shifts = calibration.calibration(0)
    assert temperatures[:2] == pytest.approx(chat.temperature, rel=0.25)
    assert shifts[:2] == pytest.approx(chat.shift, abs=0.4)
    assert temperatures[2:] == pytest.approx(1.0)
    assert shifts[2:] == pytest.approx(0.0)


def test_right_calibration_stays_and_raises_no_alarm() -> None:
    calibration = OnlineCalibration([Calibration((CHAT["temperature"],) * GAMMA, CHAT["shift"])])
    run(calibration, Traffic(**CHAT, seed=2), 2000)
    assert survival_error(calibration, Traffic(**CHAT, seed=3)) < 0.02
    assert calibration.changes <= 2
    assert np.abs(calibration.gaps()).max() < 0.05


def test_regimes_learn_apart() -> None:
    calibration = OnlineCalibration([Calibration.identity(GAMMA)] * 2)
    run(calibration, Traffic(**CHAT, seed=4), 300)
    assert calibration.calibration(1)[0] == pytest.approx(1.0)
    assert abs(calibration.calibration(0)[1][0]) > 0.3


def test_nonsense_stays_bounded() -> None:
    calibration = OnlineCalibration([Calibration.identity(GAMMA)], OnlineConfig(memory=50))
    logits = np.full((REQUESTS, GAMMA), 80.0, np.float32)
    none = np.zeros(REQUESTS, np.int64)
    for _ in range(500):
        calibration.observe(logits, none, none, none + GAMMA)
    out = np.empty((REQUESTS, GAMMA), np.float32)
    calibration.confidence(logits, none, out)
    assert np.isfinite(out).all()
    assert out[:, 0].max() < 0.3
    assert (out >= 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_has_no_confidence_and_teaches_nothing(value: float) -> None:
    logits = np.array([[1.0, value, 2.0]], np.float32)
    regimes, verified = np.zeros(1, np.int64), np.array([3])
    taught, same = (OnlineCalibration([Calibration((1.0,) * 3)]) for _ in range(2))
    confidence = taught.confidence(logits, regimes, np.ones((1, 3), np.float32))
    assert confidence[0, 1] == 0
    assert (confidence[0, [0, 2]] > 0.5).all()
    for accepted in (1, 2, 3):
        taught.observe(logits, regimes, np.array([accepted]), verified)
        same.observe(np.nan_to_num(logits), regimes, np.array([accepted]), verified)
    (temperature, shift), (other, _) = taught.calibration(0), same.calibration(0)
    assert np.isfinite([temperature, shift]).all()
    assert (temperature[1], shift[1]) == (1.0, 0.0)
    assert temperature[[0, 2]].tolist() == other[[0, 2]].tolist()


def test_impossible_outcomes_are_refused() -> None:
    calibration = OnlineCalibration([Calibration.identity(GAMMA)])
    logits, one = np.zeros((1, GAMMA), np.float32), np.ones(1, np.int64)
    with pytest.raises(ValueError, match="accepted"):
        calibration.observe(logits, 0 * one, 2 * one, one)


# Requests that stray from the average, each by a shift of its own.


class Straying:
    """Requests in slots whose shifts are drawn anew when a slot changes hands."""

    def __init__(self, spread: float, seed: int) -> None:
        self.traffic = Traffic(**CODE, seed=seed)
        self.scale = np.sqrt(spread)
        self.rows = np.arange(REQUESTS)
        self.generations = np.zeros(REQUESTS, np.int64)
        self.own = np.zeros(REQUESTS)

    def step(self, calibration: OnlineCalibration, follow: bool) -> tuple[Floats, Floats]:
        """One step: what was said and what was true of every conditional, [R, gamma] each."""
        rng = self.traffic.rng
        leaving = (self.generations == 0) | (rng.random(REQUESTS) < 1 / 60)
        self.generations[leaving] += 1
        self.own[leaving] = rng.normal(0, self.scale, int(leaving.sum()))
        logits = self.traffic.logits()
        true = 1 / (1 + np.exp(-(logits.astype(np.float64) + self.own[:, None])))
        verified = rng.integers(0, GAMMA + 1, REQUESTS)
        kept = np.cumprod(rng.random(logits.shape) < true, axis=1).sum(1)
        said = np.empty((REQUESTS, GAMMA), np.float32)
        slots = (self.rows, self.generations.copy()) if follow else None
        greedy = np.zeros(REQUESTS, np.int64)
        calibration.confidence(logits, greedy, said, slots)
        accepted = np.minimum(kept, verified)
        calibration.observe(logits, greedy, accepted, verified, slots, said if follow else None)
        return said.astype(np.float64), true


def test_requests_that_stray_are_followed() -> None:
    """Mean squared error of the chances of all drafts, by a table that expects a spread of 0.5."""

    def error(follow: bool, spread: float) -> float:
        table = Calibration((1.0,) * GAMMA, spread=0.5)
        calibration = OnlineCalibration([table], pool_rows=REQUESTS)
        world = Straying(spread, seed=5)
        pairs = [world.step(calibration, follow) for _ in range(800)]
        return float(np.mean([((said - true) ** 2).mean() for said, true in pairs]))

    lost = error(follow=False, spread=0.5)
    assert error(follow=True, spread=0.5) < 0.6 * lost
    # Following requests that do not stray at all costs little.
    assert error(follow=True, spread=0.0) < 0.25 * lost


def test_a_new_generation_is_the_average_request() -> None:
    table = Calibration((1.0,) * GAMMA, spread=0.5)
    calibration = OnlineCalibration([table], pool_rows=2)
    rows, none = np.zeros(1, np.int64), np.zeros(1, np.int64)
    logits, said = np.zeros((1, GAMMA), np.float32), np.zeros((1, GAMMA), np.float32)
    for _ in range(5):
        calibration.confidence(logits, none, said, (rows, none + 1))
        calibration.observe(logits, none, none, none + 1, (rows, none + 1), said)
    same = calibration.confidence(logits, none, said, (rows, none + 1)).copy()
    other = calibration.confidence(logits, none, said, (rows, none + 2)).copy()
    average = calibration.confidence(logits, none, said)
    assert np.array_equal(other, average)
    assert (same < average).all()


def test_survival_error_is_that_of_what_was_said() -> None:
    calibration = OnlineCalibration([Calibration.identity(2)], pool_rows=1)
    assert np.isnan(calibration.survival_error())
    one, logits = np.ones(1, np.int64), np.zeros((1, 2), np.float32)
    said = np.array([[0.8, 0.5]], np.float32)
    calibration.observe(logits, 0 * one, one, 2 * one, (0 * one, one), said)
    # a_1 = 0.8, accepted; a_2 = 0.4, rejected: gaps of 0.2 and 0.4 in two bins
    assert calibration.survival_error() == pytest.approx(0.3)
    calibration.observe(logits, 0 * one, 0 * one, 0 * one, (0 * one, one), said)
    assert calibration.survival_error() == pytest.approx(0.3)  # nothing was verified
    calibration.observe(logits, 0 * one, 2 * one, 2 * one, (0 * one, one), said)
    # both accepted now: the gaps of the bins are 0.2 + 0.2 and 0.4 - 0.6, the earlier step faded
    fade = np.exp(-2 / LONG_MEMORY)
    gaps = abs(fade * -0.2 - 0.2) + abs(fade * 0.4 - 0.6)
    assert calibration.survival_error() == pytest.approx(gaps / (2 * fade + 2), rel=1e-6)


def test_a_certain_draft_is_of_the_last_bin() -> None:
    """A survival of 1 would be the bin behind the last: nothing is written there."""
    room = np.zeros((BINS + 1, 2))
    certain, one = np.ones((1, 2), np.float32), np.ones(1, np.int64)
    _bin_survivals(certain, one, 2 * one, room[:BINS])
    assert room[BINS - 1].tolist() == [1.0, 2.0]  # two drafts, one of them rejected
    assert not room[BINS].any()
    assert not room[: BINS - 1].any()
