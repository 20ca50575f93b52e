"""Estimate acceptance by position from outcomes.

The estimate is the prior of new requests. With `schedule.without_head: past-acceptance` it also
replaces confidence for drafters without a confidence head.

For each position the share of drafts accepted among those that were reached, that is verified with
all drafts before them accepted. A shortened window has no evidence about later positions, so the
estimate is unbiased for any choice of windows. Old outcomes fade.

A request's own rates lean on the batch's: `strength` counts as that many remembered drafts. All of
it looks at finished steps only, never at the draft at hand, so it keeps admission lossless.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.budget import Counts, Gains
from sglang_dspark.schedule.compiled import compiled

Floats = NDArray[np.float64]
LEAST = 1e-3  # rates stay off 0 and 1, from where one outcome could not bring them back


@dataclass(frozen=True)
class EstimatorConfig:
    """memory, request_memory: drafts after which an outcome has faded to 1/e.

    idle: part of that fading which a step without a verified draft brings, so that a request that
    is skipped returns to the batch's rate and is tried again. strength: remembered drafts that
    the batch's rate is worth in a request's. start: rate of every position before any outcome,
    worth `start_strength` drafts.
    """

    memory: float = 500.0
    request_memory: float = 20.0
    idle: float = 0.1
    strength: float = 5.0
    start: float = 0.7
    start_strength: float = 5.0

    def __post_init__(self) -> None:
        if (
            min(self.memory, self.request_memory) < 1
            or min(self.strength, self.start_strength) <= 0
        ):
            raise ValueError(f"memories must be at least 1 and strengths above 0: {self}")
        if not 0 < self.start < 1:
            raise ValueError(f"start must lie in (0, 1): {self.start}")


@dataclass(frozen=True)
class Rates:
    """Faded counts by position: reached and accepted drafts, [..., gamma] float64."""

    reached: Floats
    accepted: Floats

    @classmethod
    def none(cls, gamma: int) -> Rates:
        """No outcome yet."""
        return cls(np.zeros(gamma), np.zeros(gamma))

    def chained(self, start: float, strength: float) -> Floats:
        """Conditional acceptance [gamma]; each position leans on the one in front of it.

        A position that is seldom reached is then no worse and no better than its neighbour.
        """
        rates: Floats = _chained(self.reached, self.accepted, start, strength)
        return rates

    def shrunk(self, towards: Floats, strength: float) -> Floats:
        """Conditional acceptance [..., gamma]; `towards` weighs as `strength` drafts."""
        rate = (self.accepted + strength * towards) / (self.reached + strength)
        return np.clip(rate, LEAST, 1 - LEAST)


class AcceptanceEstimator:
    """Rates of the batch and of each pool row's present generation."""

    def __init__(self, pool_rows: int, gamma: int, config: EstimatorConfig | None = None) -> None:
        self.config = config or EstimatorConfig()
        self.gamma = gamma
        self._all = Rates.none(gamma)
        self._reached = np.zeros((pool_rows, gamma))
        self._accepted = np.zeros((pool_rows, gamma))
        self._generation = np.full(pool_rows, -1, np.int64)

    def observe(
        self, rows: Counts, generations: Counts, accepted: Counts, verified: Counts
    ) -> None:
        """Learn outcomes of a finished step: [R] int64 each; 0 <= accepted <= verified <= gamma."""
        config = self.config
        memories = (config.memory, config.request_memory, config.idle)
        if not _observe(
            rows, generations, accepted, verified, memories, self._all.reached, self._all.accepted,
            self._reached, self._accepted, self._generation,
        ):  # fmt: skip
            raise ValueError("0 <= accepted <= verified <= gamma must hold")

    def prior(self) -> Gains:
        """Conditional acceptance of an unknown request by position: [gamma] float32."""
        rates = self._all.chained(self.config.start, self.config.start_strength)
        return rates.astype(np.float32)

    def confidence(self, rows: Counts, generations: Counts) -> Gains:
        """Conditional acceptance of these requests: [R, gamma] float32.

        Takes the place of a confidence head. A row whose generation is new gets the prior.
        """
        own = (self._generation[rows] == generations)[:, None]
        rates = Rates(self._reached[rows] * own, self._accepted[rows] * own)
        towards = self._all.chained(self.config.start, self.config.start_strength)
        return rates.shrunk(towards, self.config.strength).astype(np.float32)


@compiled
def _chained(reached, accepted, start, strength):  # type: ignore[no-untyped-def]
    rates = np.empty_like(reached)
    towards = start
    for k in range(rates.shape[0]):
        towards = (accepted[k] + strength * towards) / (reached[k] + strength)
        rates[k] = min(max(towards, LEAST), 1 - LEAST)
    return rates


@compiled
def _observe(  # type: ignore[no-untyped-def]
    rows, generations, accepted, verified, memories, all_reached, all_accepted, reached, kept, owner
) -> bool:
    """Counts of one step, into those of all requests [gamma] and of each row [pool, gamma].

    False, and nothing changed, for outcomes that cannot be. A position is reached if it was
    verified and the drafts before it were accepted.
    """
    memory, request_memory, idle = memories
    gamma = all_reached.shape[0]
    for r in range(rows.shape[0]):
        if accepted[r] < 0 or accepted[r] > verified[r] or verified[r] > gamma:
            return False
    seen, unseen = np.exp(-max(1.0, idle) / request_memory), np.exp(-idle / request_memory)
    met, good = np.zeros(gamma), np.zeros(gamma)
    for r in range(rows.shape[0]):
        row = rows[r]
        if owner[row] != generations[r]:
            owner[row] = generations[r]
            reached[row] = 0.0
            kept[row] = 0.0
        for k in range(gamma):
            if k < verified[r] and k <= accepted[r]:
                won = 1.0 if k < accepted[r] else 0.0
                reached[row, k] = reached[row, k] * seen + 1.0
                kept[row, k] = kept[row, k] * seen + won
                met[k] += 1.0
                good[k] += won
            else:
                reached[row, k] *= unseen
                kept[row, k] *= unseen
    for k in range(gamma):
        fade = np.exp(-met[k] / memory)  # positions that saw nothing forget nothing
        all_reached[k] = all_reached[k] * fade + met[k]
        all_accepted[k] = all_accepted[k] * fade + good[k]
    return True
