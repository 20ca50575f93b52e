"""Test by its first drafts whether a drafter fits its target.

Acceptance at position 1 depends on no earlier draft, so it is the clearest sign of whether a
drafter reads its target correctly. The test is one-sided and uses finished steps: the drafter is
below a limit if the upper end of a Wilson interval of its acceptance is. The scheduler prefers
drafts of high confidence, which only raises the counted acceptance.

Outcomes of one request are correlated, so at most `MOST_OF_ONE` of them count in a window. A window
is tested every `LOOK` outcomes from `LEAST` on, and restarts at `WINDOW` outcomes, so that a change
of traffic is seen. Stopping drafts requires `LEAST_TO_STOP` outcomes.

The guard soon stops a drafter that fails, and with few users the first test would be late. So until
then one planned step in `EXAMINE_EVERY` verifies first drafts even if the guard decodes plainly:
with one plan in four steps that is one step in 32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sglang_dspark.schedule.budget import Counts

# A drafter that fits is above this. Of drafters trained for 2,000 steps and more, targets accept 30
# to 62% of a domain's first drafts (results/drafters_positions.json); after 250 steps drafters are
# of little use, with 10 to 22% (results/short_length_positions.json). With random weights the
# shipped drafter had 0 of 1,132 accepted: chance is 1 / vocabulary.
FITTING = 0.1
DOUBT = 2.58  # standard errors: one look in 200 at a drafter exactly on the limit finds it below
LEAST = 64  # outcomes before the first look; with none accepted 60 are enough
LEAST_TO_STOP = 256  # outcomes, of eight requests at least
LOOK = 32  # outcomes between looks
WINDOW = 512  # outcomes
EXAMINE_EVERY = 8  # planned steps
MOST_OF_ONE = 32  # outcomes of one request in a window
FIRST_REST = 1024  # planned steps without drafts before drafting is tried again; then twice as many
LONGEST_REST = 16384


class Finding(NamedTuple):
    """First drafts accepted, of those verified, in a window so far.

    below: significantly below FITTING. stops: significantly below the configured minimum.
    """

    accepted: int
    verified: int
    below: bool
    stops: bool


def upper_bound(accepted: int, verified: int, doubt: float = DOUBT) -> float:
    """Return the upper end of the Wilson interval of accepted / verified; 1 without outcomes.

    doubt: half its width in standard errors. Wilson, J. Am. Stat. Assoc. 22 (1927), 209-212.
    """
    if verified == 0:
        return 1.0
    rate, square = accepted / verified, doubt**2 / verified
    half = doubt * math.sqrt(rate * (1 - rate) / verified + square / (4 * verified))
    return min((rate + square / 2 + half) / (1 + square), 1.0)


class FirstDrafts:
    """Outcomes of first drafts, and the pauses that a configured minimum causes."""

    def __init__(self, pool_rows: int, minimum: float | None = None) -> None:
        """Start a window; below acceptance `minimum`, in (0, 1), drafting pauses; None: never."""
        self._minimum = minimum
        self._generation = np.full(pool_rows, -1, np.int64)
        self._counted = np.zeros(pool_rows, np.int64)  # in this window, of the row's request
        self._accepted = self._verified = 0
        self._look = LEAST  # outcomes before the next look
        self.renew()

    def renew(self) -> None:
        """Forget everything, because target or drafter have new weights."""
        self._rest = 0  # planned steps that are still without drafts
        self._next_rest = FIRST_REST
        self._looked, self._planned = False, 0
        self._restart()

    def examines(self) -> bool:
        """Return whether the planned step must draft even at a loss; call once per plan."""
        self._planned += 1
        return not self._looked and self._planned % EXAMINE_EVERY == 0

    def rests(self) -> bool:
        """Return whether the planned step has no drafts; call once per plan."""
        if self._rest == 0:
            return False
        self._rest -= 1
        return True

    def observe(
        self, rows: Counts, generations: Counts, accepted: Counts, verified: Counts
    ) -> Finding | None:
        """Count a finished step, [R] int64 each, rows distinct; return the finding of a due test.

        Returns None if no test is due, or if it finds nothing and the window continues. Requests
        without a verified draft are not counted.
        """
        new = self._generation[rows] != generations
        self._generation[rows[new]] = generations[new]
        self._counted[rows[new]] = 0
        counts = (verified > 0) & (self._counted[rows] < MOST_OF_ONE)
        self._counted[rows[counts]] += 1
        self._verified += int(counts.sum())
        self._accepted += int((accepted[counts] > 0).sum())
        if self._verified < self._look:
            return None
        self._look = self._verified + LOOK
        return self._judge()

    def _judge(self) -> Finding | None:
        self._looked = True
        accepted, verified = self._accepted, self._verified
        upper = upper_bound(accepted, verified)
        stops = self._minimum is not None and verified >= LEAST_TO_STOP and upper < self._minimum
        found = Finding(accepted, verified, upper < FITTING, stops)
        if found.stops:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        elif verified >= WINDOW:
            self._next_rest = FIRST_REST
        elif not found.below:
            return None
        if found.stops or verified >= WINDOW:
            self._restart()
        return found

    def _restart(self) -> None:
        """Begin a new window."""
        self._accepted = self._verified = 0
        self._look = LEAST
        self._counted[:] = 0
