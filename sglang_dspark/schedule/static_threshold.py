"""The schedule that the paper compares with: verify a request's drafts while confidence is high.

Paper, 4.4 and Fig. 5: position k of a request is verified if c_1 .. c_k all exceed a threshold,
whatever the load and whatever a step costs. Every step drafts gamma positions. It is lossless, as
c_k does not depend on x_k; it is not hardware-aware, which is what the other planners add.
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
        """threshold: conditional confidence in [0, 1) that a verified draft must exceed.

        Raises ValueError when it lies elsewhere.
        """
        if not 0.0 <= threshold < 1.0:
            raise ValueError(f"a threshold on confidence lies in [0, 1), not at {threshold}")
        self.threshold = threshold
        self.experience = Experience(gamma, pool_rows, costs, config or PlannerConfig())

    def plan(
        self,
        step: int,
        rows: Counts,
        tenants: Counts,
        context: int,
        *,
        weights: Gains | None = None,
        limits: Counts | None = None,
        floors: Counts | None = None,
        relay_arrived: bool = True,
    ) -> Plan:
        """Draft all positions; the budget is what earlier confidences let expect.

        weights and floors mean nothing here.
        """
        requests = len(rows)
        confidence, known = self.experience.confidence(step, rows, tenants, relay_arrived)
        most = np.full(requests, self.gamma) if limits is None else limits
        lengths = np.minimum(self._above(confidence), most)
        costs = self.costs.costs(requests, context)
        drafts = int(lengths.sum())
        seconds = float(costs.tokens[requests + drafts] + costs.fixed + costs.draft[self.gamma])
        admitted = np.arange(self.gamma) < lengths[:, None]  # [R, gamma]
        tokens = requests + float(np.where(admitted, gains(confidence), 0.0).sum())
        budget = Budget(drafts, self.gamma, tokens / seconds, seconds)
        return Plan(
            step, requests, context, budget, most, None, Mode.SPECULATE, True, known, gain=1.0
        )

    def admit(self, plan: Plan, confidence: Gains | None) -> Counts:
        """Verify lengths l_r, [R] int64, by this step's calibrated confidence [R, gamma]."""
        if confidence is None:
            return np.zeros(plan.requests, np.int64)
        return np.minimum(self._above(confidence), plan.limits)

    def finished(
        self,
        plan: Plan,
        rows: Counts,
        tenants: Counts,
        accepted: Counts,
        verified: Counts,
        confidence: Gains | None,
        seconds: float | None,
    ) -> None:
        """Learn what later plans expect; no outcome and no time changes what is verified."""
        if confidence is not None:
            self.experience.estimator.observe(rows, tenants, accepted, verified)
        if seconds is not None:
            self.experience.timed(plan, verified, seconds)

    def describe(self) -> str:
        """By what it schedules, for the log's line at the start."""
        return f"a threshold of {self.threshold:g} on {self.experience.signal} alone"

    @property
    def fallbacks(self) -> int:
        """It never falls back."""
        return 0

    def _above(self, confidence: Gains) -> Counts:
        """Leading positions of each row above the threshold: [R, gamma] -> [R] int64."""
        above = confidence.astype(np.float64) > self.threshold
        return np.cumprod(above, axis=1).sum(axis=1)
