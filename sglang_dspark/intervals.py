"""95% interval of a paired ratio over few trials: the t interval of the log ratios.

Every measurement of this package that is repeated a few times takes its interval here. A percentile
bootstrap is too narrow for that: of three trials it is the range of the three ratios, and of eight
it covers the truth in 87.5% of cases instead of 95%. The t interval covers 95% at any number of
trials when the log ratios are normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student  # type: ignore[import-untyped]

from sglang_dspark.errors import DSparkError

MIN_TRIALS = 3
CONFIDENCE = 0.95
METHOD = "paired t of log ratios"


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

    @property
    def bounds(self) -> list[float] | None:
        """[low, high] for a result file, None where there were too few trials."""
        return [self.low, self.high] if math.isfinite(self.high) else None


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Interval of over / under; over[i] and under[i] come from the same trial.

    Takes speeds or times of any unit, all above 0. With fewer than three trials the interval is
    infinite: such a run can name no winner. Raises DSparkError when the numbers cannot be paired.
    """
    if len(over) != len(under) or not len(over):
        raise DSparkError(f"arms need the same trials: {len(over)} against {len(under)}")
    values = np.array([over, under], dtype=np.float64)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise DSparkError("a trial has no speed above 0; leave void cells out on both sides")
    logs = np.log(values[0] / values[1])  # [trials]
    trials, mid = len(logs), math.exp(logs.mean())
    if trials < MIN_TRIALS:
        return Ratio(0.0, mid, math.inf, trials, f"none: fewer than {MIN_TRIALS} trials")
    quantile = float(student.ppf(0.5 + CONFIDENCE / 2, trials - 1))
    factor = math.exp(quantile * logs.std(ddof=1) / math.sqrt(trials))
    return Ratio(mid / factor, mid, mid * factor, trials, METHOD)
