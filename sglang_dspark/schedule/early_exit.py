"""Requests whose blocks keep failing stop taking verify tokens from the others.

A request that lost `patience` verified blocks in a row at their first draft gets no drafts admitted
for a while, then one block to show itself. Each failure doubles the rest, one accepted draft ends
it. Counted from finished steps only, so the limits are known before drafting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_dspark.schedule.budget import Counts


@dataclass(frozen=True)
class ExitConfig:
    """patience: failed blocks in a row. first_rest, longest_rest: steps without drafts."""

    patience: int = 8
    first_rest: int = 16
    longest_rest: int = 256

    def __post_init__(self) -> None:
        if self.patience < 1 or not 1 <= self.first_rest <= self.longest_rest:
            raise ValueError(f"patience and rests must be at least 1 and ordered: {self}")


class EarlyExit:
    """Failures of each pool row's present tenant."""

    def __init__(self, pool_rows: int, gamma: int, config: ExitConfig | None = None) -> None:
        self.config = config or ExitConfig()
        self.gamma = gamma
        self._tenant = np.full(pool_rows, -1, np.int64)
        self._failed = np.zeros(pool_rows, np.int64)
        self._rest = np.zeros(pool_rows, np.int64)  # length of the next rest
        self._until = np.zeros(pool_rows, np.int64)  # first step that may draft again

    def limits(self, step: int, rows: Counts, tenants: Counts) -> Counts:
        """Most drafts of each request in step `step`: [R] int64, 0 or gamma."""
        resting = (self._tenant[rows] == tenants) & (step < self._until[rows])
        return np.where(resting, 0, self.gamma)

    def observe(
        self, step: int, rows: Counts, tenants: Counts, accepted: Counts, verified: Counts
    ) -> None:
        """Outcomes of finished step `step`: [R] int64 each. Blocks with no draft say nothing."""
        new = self._tenant[rows] != tenants
        for state in (self._failed, self._rest, self._until):
            state[rows[new]] = 0
        self._tenant[rows] = tenants
        worked = rows[accepted > 0]
        self._failed[worked] = 0
        self._rest[worked] = 0
        self._until[worked] = 0
        failing = rows[(verified > 0) & (accepted == 0)]
        self._failed[failing] += 1
        tried_again = (self._rest[failing] > 0) & (step >= self._until[failing])
        leaving = failing[(self._failed[failing] >= self.config.patience) | tried_again]
        self._rest[leaving] = np.clip(
            2 * self._rest[leaving], self.config.first_rest, self.config.longest_rest
        )
        self._until[leaving] = step + 1 + self._rest[leaving]
        self._failed[leaving] = 0

    def resting(self, step: int, rows: Counts, tenants: Counts) -> int:
        """How many of these requests rest in step `step`."""
        return int((self.limits(step, rows, tenants) == 0).sum())
