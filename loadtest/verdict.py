"""Which arm is faster: paired intervals over interleaved trials, a verdict that may be "no one".

A trial measures every arm once, next to each other, so that a slow minute of the machine hits all
of them; only ratios within a trial are compared. With few trials the percentile bootstrap is too
narrow (of three trials it is the range of the three ratios, which misses the truth one time in
four), so below `EXACT_BELOW` trials the interval is the paired t interval of the log ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.errors import DSparkError

MIN_TRIALS = 3
EXACT_BELOW = 8
_STUDENT = {3: 4.302653, 4: 3.182446, 5: 2.776445, 6: 2.570582, 7: 2.446912}  # 97.5%, by trials
_DRAWS = 10_000
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of paired ratios with its 95% interval. method: how it was taken."""

    low: float
    mid: float
    high: float
    trials: int
    method: str

    @property
    def winner(self) -> str:
        """ "over", "under", or "" while the interval contains 1 or cannot be taken."""
        if self.low > 1:
            return "over"
        return "under" if self.high < 1 else ""


def paired_ratio(over: Sequence[float], under: Sequence[float], *, seed: int = 0) -> Ratio:
    """Interval of over / under; over[i] and under[i] come from the same trial.

    Takes speeds of any kind, all above 0. With fewer than three trials the interval is infinite:
    such a run can name no winner. Raises DSparkError when the numbers cannot be paired.
    """
    if len(over) != len(under) or not over:
        raise DSparkError(f"arms need the same trials: {len(over)} against {len(under)}")
    values = np.array([over, under], dtype=np.float64)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise DSparkError("a trial has no speed above 0; leave void cells out on both sides")
    logs = np.log(values[0] / values[1])  # [trials]
    trials = len(logs)
    mid = math.exp(logs.mean())
    if trials < MIN_TRIALS:
        return Ratio(0.0, mid, math.inf, trials, "none: fewer than 3 trials")
    if trials < EXACT_BELOW:
        half = _STUDENT[trials] * logs.std(ddof=1) / math.sqrt(trials)
        low, high, method = logs.mean() - half, logs.mean() + half, "paired t of log ratios"
    else:
        low, high = _bootstrap(logs, seed)
        method = "paired bootstrap"
    return Ratio(math.exp(low), mid, math.exp(high), trials, method)


def verdict(name: str, against: str, what: str, ratio: Ratio) -> str:
    """One sentence. what: the quantity compared, such as "throughput at 4 users"."""
    shown = f"{ratio.mid:.2f}x (95% {ratio.low:.2f} to {ratio.high:.2f}, {ratio.trials} trials)"
    if ratio.trials < MIN_TRIALS:
        few = "one trial is" if ratio.trials == 1 else f"{ratio.trials} trials are"
        return f"No winner in {what}: {few} too few to tell ({ratio.mid:.2f}x)."
    if ratio.winner == "over":
        return f"{name} beats {against} in {what}: {shown}."
    if ratio.winner == "under":
        return f"{name} is behind {against} in {what}: {shown}."
    return f"No winner between {name} and {against} in {what}: {shown} contains 1."


def arm_order(arms: Sequence[str], trial: int) -> list[str]:
    """The arms' order in a trial (from 0): rotated, and reversed every other time.

    Over 2 x len(arms) trials each arm is as often at each place, and as often before as after
    each other arm.
    """
    shift = trial // 2 % len(arms)
    order = [*arms[shift:], *arms[:shift]]
    return order if trial % 2 == 0 else order[::-1]


def tight_enough(ratio: Ratio, width: float) -> bool:
    """Whether more trials are not needed: the interval spans at most `width` of its middle."""
    return ratio.high - ratio.low <= width * ratio.mid


def _bootstrap(logs: Floats, seed: int) -> tuple[float, float]:
    """95% percentile interval of the mean over resampled trials."""
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(logs), size=(_DRAWS, len(logs)))
    low, high = np.quantile(logs[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
