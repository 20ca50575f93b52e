"""Predict step times: the profiled table, corrected by every measured step.

Each part of a step has a correction in log space: the knots of the token curve next to its B, the
draft, and one factor common to all. A measured step updates them by normalised least mean squares,
each part in proportion to its share of the prediction. So the common factor follows a machine that
got slower everywhere, and a knot follows a tier that was timed wrong.

A step far outside the usual spread is an outlier and changes nothing, unless many in a row are on
the same side: then the machine has changed. Steps that also prefilled are never passed to
`observe`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sglang_dspark.schedule.budget import Costs, Seconds
from sglang_dspark.schedule.cost_table import CostTable, draft_row, monotone, tokens_curve


@dataclass(frozen=True)
class UpdateConfig:
    """Rates of the model's updates (dimensionless; errors are of log seconds)."""

    rate: float = 0.05  # part of an error that one step corrects
    clip: float = 0.2  # errors are clipped to this
    outlier: float = 0.4  # errors above this, and above `spread` usual errors, are outliers
    spread: float = 5.0
    persistent: int = 12  # after this many outliers in a row on one side the next ones count
    refresh: int = 16  # steps between rebuilds of the curve that the planner reads
    window: int = 512  # steps over which the prediction error is reported

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1 or min(self.clip, self.outlier, self.spread) <= 0:
            raise ValueError(f"rate must lie in (0, 1], clip, outlier, spread above 0: {self}")
        if min(self.persistent, self.refresh, self.window) < 1:
            raise ValueError(f"persistent, refresh and window must be at least 1: {self}")


@dataclass(frozen=True)
class Step:
    """A decode step: R, B, context tokens of all requests, drafted positions (0: no draft)."""

    requests: int
    tokens: int
    context: int
    depth: int


class CostModel:
    """Predicted step times for the planner; only the planning thread updates them."""

    def __init__(
        self, table: CostTable, max_requests: int, config: UpdateConfig | None = None
    ) -> None:
        if max_requests < 1:
            raise ValueError(f"max_requests must be at least 1: {max_requests}")
        self.table = table
        self.config = config or UpdateConfig()
        self.max_requests = max_requests
        self._knots = np.asarray(table.knots)
        self._common = 0.0  # log factors
        self._draft = 0.0
        self._knot = np.zeros(len(table.knots))
        self._usual = 0.05  # running mean of |error|
        self._streak = 0  # signed number of outliers in a row
        self._since = 0
        self._errors = np.full(self.config.window, np.nan)
        self._seen = 0
        self.outliers = 0
        self._drafts: dict[int, Seconds] = {}
        self._batch = np.arange(max_requests * (1 + table.gamma) + 1, dtype=np.float64)
        self._with_context = np.empty_like(self._batch)
        self._refresh()

    def costs(self, requests: int, context: int, *, rising: bool = False) -> Costs:
        """Return the costs of a step of R requests with `context` tokens in all.

        Each request is assumed to have the mean context. rising: without tiers, more tokens never
        cost less, for a rule that stops at the first rise. The result is valid until the next call.
        """
        if not 1 <= requests <= self.max_requests:
            raise ValueError(f"{requests} requests, the model was made for {self.max_requests}")
        factor = math.exp(self._common)
        fixed = factor * self.table.per_request * requests
        attention = factor * self.table.per_context * context / requests  # of a row
        curve = self._rising if rising else self._curve
        if attention == 0:
            return Costs(curve, fixed, self._draft_row(requests))
        most = requests * (1 + self.table.gamma) + 1
        tokens = self._with_context[:most]
        np.multiply(self._batch[:most], attention, out=tokens)
        tokens += curve[:most]
        return Costs(tokens, fixed, self._draft_row(requests))

    def predict(self, step: Step) -> float:
        """Return the predicted seconds of a step."""
        costs = self.costs(step.requests, step.context)
        return float(costs.tokens[step.tokens] + costs.fixed + costs.draft[step.depth])

    def observe(self, step: Step, seconds: float) -> bool:
        """Learn from a measured step without prefill; return False if it is an outlier.

        Raises ValueError if seconds is not positive and finite.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"a step cannot take {seconds} seconds")
        predicted = self.predict(step)
        error = math.log(seconds / predicted)
        self._errors[self._seen % self.config.window] = abs(math.expm1(-error))
        self._seen += 1
        if self._is_outlier(error):
            self.outliers += 1
            return False
        bounded = max(-self.config.clip, min(self.config.clip, error))
        self._usual += self.config.rate * (abs(bounded) - self._usual)
        self._move(step, predicted, self.config.rate * bounded)
        self._since += 1
        if self._since >= self.config.refresh:
            self._refresh()
        return True

    def median_error(self) -> float:
        """Return the median of |predicted / measured - 1| over `window` steps; NaN before any."""
        return float(np.nanmedian(self._errors)) if self._seen else math.nan

    @property
    def steps(self) -> int:
        """Return the number of steps observed."""
        return self._seen

    def _is_outlier(self, error: float) -> bool:
        if abs(error) <= max(self.config.outlier, self.config.spread * self._usual):
            self._streak = 0
            return False
        side = 1 if error > 0 else -1
        self._streak = self._streak + side if self._streak * side > 0 else side
        return abs(self._streak) <= self.config.persistent

    def _move(self, step: Step, predicted: float, amount: float) -> None:
        """Distribute a correction of log seconds over the parts by their shares."""
        upper = int(np.searchsorted(self._knots, step.tokens, side="left"))
        upper = min(upper, len(self._knots) - 1)
        lower, weight = upper, 1.0
        if not self.table.padded and upper > 0 and step.tokens < self._knots[upper]:
            lower = upper - 1
            gap = self._knots[upper] - self._knots[lower]
            weight = float(step.tokens - self._knots[lower]) / float(gap)
        share = float(self._curve[step.tokens]) / predicted
        drafting = float(self._draft_row(step.requests)[step.depth]) / predicted
        drafting = drafting if step.depth > 0 else 0.0
        high, low = share * weight, share * (1 - weight)
        norm = 1.0 + high**2 + low**2 + drafting**2
        self._common += amount / norm
        self._knot[upper] += amount * high / norm
        self._knot[lower] += amount * low / norm
        self._draft += amount * drafting / norm

    def _refresh(self) -> None:
        self._since = 0
        seconds = np.asarray(self.table.seconds) * np.exp(self._common + self._knot)
        self._curve = self._rising = self._tokens(seconds)
        if not self.table.padded:
            self._rising = self._tokens(monotone(seconds))
            # Each tier is a separate program, and a larger one may be faster. So may be a larger
            # number of rows on a CPU: six can take less time than four. From the first gap on,
            # knots are samples of one curve, where a drop is noise.
            gaps = np.flatnonzero(np.diff(self._knots) > 1)
            sampled = slice(int(gaps[0]) if len(gaps) else len(seconds), None)
            seconds[sampled] = monotone(seconds[sampled])
            self._curve = self._tokens(seconds)
        self._drafts.clear()

    def _tokens(self, seconds: Seconds) -> Seconds:
        most = self.max_requests * (1 + self.table.gamma)
        return tokens_curve(self.table.knots, seconds, self.table.padded, most)

    def _draft_row(self, requests: int) -> Seconds:
        row = self._drafts.get(requests)
        if row is None:
            row = draft_row(self.table, requests) * math.exp(self._common)
            row[1:] *= math.exp(self._draft)
            self._drafts[requests] = row
        return row
