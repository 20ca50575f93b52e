"""Verify a request's drafts while confidence is high: the schedule that the paper compares with.

Paper, 4.4 and Fig. 5: position k of a request is verified if c_1 .. c_k all exceed a threshold, at
any load and any cost of a step. Every step drafts gamma positions. It is lossless, as c_k does not
depend on x_k. It is not hardware-aware, unlike the other planners.

With online calibration, confidences below the threshold would stay there, because only verified
drafts update them. So a position that was verified in none of `PROBE_EVERY` steps is verified in
the next one, at any confidence. Only finished steps decide that.
"""

from __future__ import annotations

import numpy as np

from sglang_dspark.schedule.budget import Budget, Counts, Gains
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.experience import Experience
from sglang_dspark.schedule.gains import gains
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.plan import Plan, PlannerConfig
from sglang_dspark.schedule.planner_protocol import Planner

PROBE_EVERY = 64  # steps; one pass of gamma + 1 rows in so many costs little


class ThresholdPlanner(Planner):
    """A planner without budget, guard, early exit or floors."""

    def __init__(
        self,
        threshold: float,
        gamma: int,
        pool_rows: int,
        costs: CostModel,
        config: PlannerConfig | None = None,
    ) -> None:
        """Set the conditional confidence in [0, 1) that a verified draft must exceed.

        Raises ValueError for any other threshold.
        """
        if not 0.0 <= threshold < 1.0:
            raise ValueError(f"a threshold on confidence lies in [0, 1), not at {threshold}")
        self.threshold = threshold
        self._unseen = np.zeros(gamma, np.int64)  # steps since each position was verified
        self.experience = Experience(gamma, pool_rows, costs, config or PlannerConfig())

    def plan(
        self,
        step: int,
        rows: Counts,
        generations: Counts,
        context: int,
        *,
        weights: Gains | None = None,
        limits: Counts | None = None,
        floors: Counts | None = None,
        relay_arrived: bool = True,
        examine: bool = False,
    ) -> Plan:
        """Draft all positions; the budget is an expectation from earlier confidences.

        weights, floors and examine are ignored.
        """
        requests = len(rows)
        confidence, known = self.experience.confidence(step, rows, generations, relay_arrived)
        most = np.full(requests, self.gamma) if limits is None else limits
        least = self._probed(most)
        lengths = self._within(confidence, most, least)
        costs = self.costs.costs(requests, context)
        drafts = int(lengths.sum())
        seconds = float(costs.tokens[requests + drafts] + costs.fixed + costs.draft[self.gamma])
        admitted = np.arange(self.gamma) < lengths[:, None]  # [R, gamma]
        tokens = requests + float(np.where(admitted, gains(confidence), 0.0).sum())
        budget = Budget(drafts, self.gamma, tokens / seconds, seconds)
        return Plan(
            step, requests, context, budget, most, least, Mode.SPECULATE, True, known, gain=1.0
        )

    def admit(self, plan: Plan, confidence: Gains | None) -> Counts:
        """Return verify lengths l_r, [R] int64, by this step's calibrated confidence [R, gamma]."""
        if confidence is None:
            return np.zeros(plan.requests, np.int64)
        return self._within(confidence, plan.limits, plan.floors)

    def finished(
        self,
        plan: Plan,
        rows: Counts,
        generations: Counts,
        accepted: Counts,
        verified: Counts,
        confidence: Gains | None,
        seconds: float | None,
    ) -> None:
        """Update the expectations of later plans; they do not change which drafts are verified.

        Verification depends only on how long each position was not verified, which is counted here.
        """
        deepest = int(verified.max(initial=0))
        self._unseen[:deepest] = 0
        self._unseen[deepest:] += 1
        if confidence is not None:
            self.experience.estimator.observe(accepted, verified)
        if seconds is not None:
            self.experience.timed(plan, verified, seconds)

    def describe(self) -> str:
        """Describe the threshold and the signal, for the log's line at the start."""
        return f"a threshold of {self.threshold:g} on {self.experience.signal} alone"

    @property
    def fallbacks(self) -> int:
        """Return 0: this planner never falls back."""
        return 0

    def _probed(self, most: Counts) -> Counts | None:
        """Return leading positions to verify at any confidence, [R]; None if none is overdue."""
        overdue = np.flatnonzero(self._unseen >= PROBE_EVERY)
        return np.minimum(most, int(overdue[-1]) + 1) if len(overdue) else None

    def _within(self, confidence: Gains, most: Counts, least: Counts | None) -> Counts:
        """Return the leading positions above the threshold, in these limits: [R] int64."""
        lengths = np.minimum(self._above(confidence), most)
        return lengths if least is None else np.maximum(lengths, least)

    def _above(self, confidence: Gains) -> Counts:
        """Count the leading positions of each row above the threshold: [R, gamma] -> [R] int64."""
        above = confidence.astype(np.float64) > self.threshold
        return np.cumprod(above, axis=1).sum(axis=1)
