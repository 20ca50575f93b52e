"""Choose the next arrival rate to try, to find the highest that holds the limits in few tries.

Double until a rate misses, halve until one holds, then try the geometric middle of the two. A
measured rate may mislead by its noise: no rate at or above one that missed counts as held, so the
result errs to the low side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

HoldKind = Literal["bracketed", "at least", "none", "unknown"]


@dataclass(frozen=True)
class Probe:
    """A measured rate in requests/s, and whether the limits held there."""

    rate: float
    held: bool


@dataclass(frozen=True)
class Bracket:
    """The highest rate that held below the lowest that missed; None if there is none."""

    held: float | None
    missed: float | None

    @property
    def kind(self) -> HoldKind:
        """Return the kind. `at least`: none missed; `none`: none held; `unknown`: not measured."""
        if self.held is None:
            return "unknown" if self.missed is None else "none"
        return "at least" if self.missed is None else "bracketed"


def bracket(probes: Sequence[Probe]) -> Bracket:
    """Bracket the held rate by the probes, in any order."""
    missed = min((probe.rate for probe in probes if not probe.held), default=None)
    below = [p.rate for p in probes if p.held and (missed is None or p.rate < missed)]
    return Bracket(max(below, default=None), missed)


def next_rate(probes: Sequence[Probe], start: float, most: int, narrow: float) -> float | None:
    """Return the next rate to measure; None if the bracket is narrow or `most` were measured.

    start: the first one; narrow: relative width of the bracket at which the search ends.
    """
    if len({probe.rate for probe in probes}) >= most:
        return None
    found = bracket(probes)
    if found.held is None:
        rate = start if found.missed is None else found.missed / 2
    elif found.missed is None:
        rate = 2 * found.held
    elif found.missed <= found.held * (1 + narrow):
        return None
    else:
        rate = math.sqrt(found.held * found.missed)
    rate = float(f"{rate:.3g}")  # the precision of cell names
    return None if rate <= 0 or any(rate == probe.rate for probe in probes) else rate
