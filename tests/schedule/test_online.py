"""Online calibration: follows a change of traffic, right under censoring, bounded."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_dspark.schedule.calibration import Calibration
from sglang_dspark.schedule.online import OnlineCalibration, OnlineConfig

GAMMA, REQUESTS = 5, 8


class Traffic:
    """Blocks whose drafts are accepted with chance sigmoid((logit + shift) / heat)."""

    def __init__(self, mean: float, shift: float, heat: float, seed: int) -> None:
        self.mean, self.shift, self.heat = mean, shift, heat
        self.rng = np.random.default_rng(seed)

    def logits(self) -> NDArray[np.float32]:
        """[R, gamma], of varying difficulty."""
        hard = self.rng.normal(self.mean, 1.5, (REQUESTS, 1))
        return (hard + self.rng.normal(0, 1, (REQUESTS, GAMMA))).astype(np.float32)

    def chance(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        return 1 / (1 + np.exp(-(logits.astype(np.float64) + self.shift) / self.heat))

    def accepted(
        self, logits: NDArray[np.float32], verified: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        kept = self.rng.random(logits.shape) < self.chance(logits)
        return np.minimum(np.cumprod(kept, axis=1).sum(1), verified)


CODE = dict(mean=1.5, shift=0.0, heat=1.0)
CHAT = dict(mean=0.5, shift=-1.2, heat=1.6)


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
    assert temperatures[:2] == pytest.approx(chat.heat, rel=0.25)
    assert shifts[:2] == pytest.approx(chat.shift, abs=0.4)
    assert temperatures[2:] == pytest.approx(1.0)
    assert shifts[2:] == pytest.approx(0.0)


def test_right_calibration_stays_and_raises_no_alarm() -> None:
    calibration = OnlineCalibration([Calibration((CHAT["heat"],) * GAMMA, CHAT["shift"])])
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


def test_impossible_outcomes_are_refused() -> None:
    calibration = OnlineCalibration([Calibration.identity(GAMMA)])
    logits, one = np.zeros((1, GAMMA), np.float32), np.ones(1, np.int64)
    with pytest.raises(ValueError, match="accepted"):
        calibration.observe(logits, 0 * one, 2 * one, one)
