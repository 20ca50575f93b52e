"""Bootstrap over prompts, stratified by domain and shared by all drafters of a comparison.

Steps of one prompt are not independent, so prompts are drawn, not steps. Each domain keeps its
number of prompts, so a macro average (each domain counting once) has its own interval. Drafters
are compared on the same draws (paired): an easy prompt is easy for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator

Floats = NDArray[np.float64]
# A number of a result; an unknown one is NaN, and null in the result's file.
Number = Annotated[float, BeforeValidator(lambda found: math.nan if found is None else found)]
MACRO = "macro"
DRAWS = 4000


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% percentile interval."""

    value: Number
    low: Number
    high: Number


class Resampler:
    """The draws of one comparison: for each domain, how often each of its prompts is drawn."""

    def __init__(self, domains: Sequence[str], *, draws: int = DRAWS, seed: int = 0):
        """Draw the prompts. domains: of each prompt, in the order of the arrays to resample."""
        generator = np.random.default_rng(seed)
        self.domains = list(dict.fromkeys(domains))
        self._index: dict[str, NDArray[np.int64]] = {}
        self._weight: dict[str, Floats] = {}
        for domain in self.domains:
            index = np.array([i for i, name in enumerate(domains) if name == domain])
            chosen = generator.multinomial(
                len(index), np.full(len(index), 1 / len(index)), size=draws
            )
            self._index[domain] = index
            # Row 0 is the sample itself, the others are draws: [draws + 1, n].
            self._weight[domain] = np.vstack([np.ones(len(index)), chosen]).astype(np.float64)

    def ratios(self, numerator: Floats, denominator: Floats) -> dict[str, Floats]:
        """Return sum(numerator) / sum(denominator) by domain and macro average: [draws + 1] each.

        numerator, denominator: [prompts]. Entry 0 is the value of the sample itself.
        """
        result: dict[str, Floats] = {}
        with np.errstate(invalid="ignore", divide="ignore"):
            for domain in self.domains:
                index, weight = self._index[domain], self._weight[domain]
                result[domain] = (weight @ numerator[index]) / (weight @ denominator[index])
        result[MACRO] = np.mean([result[domain] for domain in self.domains], axis=0)
        return result


def estimate(drawn: Floats) -> Estimate:
    """Return value and interval of [draws + 1] numbers whose first is the sample's.

    NaN draws are ignored (a draw may hold no step that counts).
    """
    usable = drawn[1:][np.isfinite(drawn[1:])]
    if len(usable) == 0:
        return Estimate(float(drawn[0]), float("nan"), float("nan"))
    low, high = np.percentile(usable, [2.5, 97.5])
    return Estimate(float(drawn[0]), float(low), float(high))
