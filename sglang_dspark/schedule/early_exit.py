"""Pause drafts of requests whose blocks keep failing at high confidence.

At low confidence the planner admits few drafts. A request may reject the first draft of block after
block, although its own confidence gives that a chance below `surprise`. Then the confidence is
wrong, and the request gets no drafts for some steps, then one block as a trial. Each failed trial
doubles the pause; one accepted draft ends it. Only finished steps are counted, so the limits are
known before drafting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_dspark.schedule.budget import Counts, Gains
from sglang_dspark.schedule.compiled import compiled


@dataclass(frozen=True)
class ExitConfig:
    """Thresholds of early exit.

    surprise: least believed chance of the current run of failures, by the request's own confidence.
    first_rest, longest_rest: steps without drafts.
    """

    surprise: float = 1e-4
    first_rest: int = 16
    longest_rest: int = 256

    def __post_init__(self) -> None:
        if not 0 < self.surprise < 1:
            raise ValueError(f"surprise must lie in (0, 1): {self.surprise}")
        if not 1 <= self.first_rest <= self.longest_rest:
            raise ValueError(f"rests must be at least 1 and ordered: {self}")


class EarlyExit:
    """Failures of each pool row's current generation."""

    def __init__(self, pool_rows: int, gamma: int, config: ExitConfig | None = None) -> None:
        self.config = config or ExitConfig()
        self.gamma = gamma
        self._generation = np.full(pool_rows, -1, np.int64)
        self._chance = np.zeros(pool_rows)  # log chance of the current run of failures
        self._rest = np.zeros(pool_rows, np.int64)  # length of the next rest
        self._until = np.zeros(pool_rows, np.int64)  # first step that may draft again

    def limits(self, step: int, rows: Counts, generations: Counts) -> Counts:
        """Return the most drafts of each request in step `step`: [R] int64, 0 or gamma."""
        resting = (self._generation[rows] == generations) & (step < self._until[rows])
        return np.where(resting, 0, self.gamma)

    def observe(
        self,
        step: int,
        rows: Counts,
        generations: Counts,
        accepted: Counts,
        verified: Counts,
        first: Gains,
    ) -> None:
        """Learn the outcomes of finished step `step`, [R] int64 each.

        first: [R] float32, confidence c_1 of each block. Blocks without a verified draft are
        ignored.
        """
        settings = (np.log(self.config.surprise), self.config.first_rest, self.config.longest_rest)
        _observe(
            step, rows, generations, accepted, verified, first, settings,
            self._generation, self._chance, self._rest, self._until,
        )  # fmt: skip

    def resting(self, step: int, rows: Counts, generations: Counts) -> int:
        """Count the requests that have no drafts in step `step`."""
        return int((self.limits(step, rows, generations) == 0).sum())


@compiled
def _observe(  # type: ignore[no-untyped-def]
    step, rows, generations, accepted, verified, first, settings, owner, chance, rest, until
) -> None:
    least, first_rest, longest_rest = settings
    for r in range(rows.shape[0]):
        row = rows[r]
        if owner[row] != generations[r] or accepted[r] > 0:
            owner[row] = generations[r]
            chance[row], rest[row], until[row] = 0.0, 0, 0
        if verified[r] == 0 or accepted[r] > 0:
            continue
        chance[row] += np.log1p(-min(np.float64(first[r]), 0.99))
        if chance[row] < least or (rest[row] > 0 and step >= until[row]):
            rest[row] = min(max(2 * rest[row], first_rest), longest_rest)
            until[row] = step + 1 + rest[row]
            chance[row] = 0.0
