"""Estimate acceptance by position from outcomes: the prior of requests without a confidence.

The estimate of a position is the share accepted of the drafts reached there: verified, with all
drafts before them accepted. A shortened window has no evidence about later positions, so the
estimate is unbiased for any choice of windows. Old outcomes fade. The estimate uses finished steps
only, never the current draft, so admission stays lossless.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_dspark.schedule.budget import Counts, Gains
from sglang_dspark.schedule.compiled import compiled

LEAST = 1e-3  # rates stay this far from 0 and 1, which one outcome could not correct


@dataclass(frozen=True)
class EstimatorConfig:
    """memory: drafts after which an outcome has faded to 1/e.

    start: rate of every position before any outcome, worth `start_strength` drafts.
    """

    memory: float = 500.0
    start: float = 0.7
    start_strength: float = 5.0

    def __post_init__(self) -> None:
        if self.memory < 1 or self.start_strength <= 0:
            raise ValueError(f"memory must be at least 1 and start_strength above 0: {self}")
        if not 0 < self.start < 1:
            raise ValueError(f"start must lie in (0, 1): {self.start}")


class AcceptanceEstimator:
    """Faded counts of all requests by position: drafts reached and accepted, [gamma] float64."""

    def __init__(self, gamma: int, config: EstimatorConfig | None = None) -> None:
        self.config = config or EstimatorConfig()
        self._reached, self._accepted = np.zeros(gamma), np.zeros(gamma)

    def observe(self, accepted: Counts, verified: Counts) -> None:
        """Learn outcomes of a finished step: [R] int64; 0 <= accepted <= verified <= gamma."""
        memory = self.config.memory
        if not _observe(accepted, verified, memory, self._reached, self._accepted):
            raise ValueError("0 <= accepted <= verified <= gamma must hold")

    def prior(self) -> Gains:
        """Return the conditional acceptance of an unknown request by position: [gamma] float32.

        Each position is pulled to the one before it, so a position that is seldom reached has about
        the rate of its neighbour.
        """
        start, strength = self.config.start, self.config.start_strength
        rates: Gains = _chained(self._reached, self._accepted, start, strength).astype(np.float32)
        return rates


@compiled
def _chained(reached, accepted, start, strength):  # type: ignore[no-untyped-def]
    rates = np.empty_like(reached)
    towards = start
    for k in range(rates.shape[0]):
        towards = (accepted[k] + strength * towards) / (reached[k] + strength)
        rates[k] = min(max(towards, LEAST), 1 - LEAST)
    return rates


@compiled
def _observe(accepted, verified, memory, reached, kept) -> bool:  # type: ignore[no-untyped-def]
    """Add the outcomes of one step; return False, with no change, if they are inconsistent.

    A position is reached if it was verified and the drafts before it were accepted.
    """
    gamma = reached.shape[0]
    for r in range(accepted.shape[0]):
        if accepted[r] < 0 or accepted[r] > verified[r] or verified[r] > gamma:
            return False
    met, good = np.zeros(gamma), np.zeros(gamma)
    for r in range(accepted.shape[0]):
        for k in range(min(verified[r], accepted[r] + 1)):
            met[k] += 1.0
            if k < accepted[r]:
                good[k] += 1.0
    for k in range(gamma):
        fade = np.exp(-met[k] / memory)  # positions without outcomes do not fade
        reached[k] = reached[k] * fade + met[k]
        kept[k] = kept[k] * fade + good[k]
    return True
