"""Plan by the paper's Algorithm 1: K is found once the step's drafts are there (lag 0).

Drafts are admitted in the order of their own survivals until the first that would lower Theta, so
no lag is needed. The plan's limits, floors, weights and depth hold; its K is only an expectation.
"""

from __future__ import annotations

from sglang_dspark.schedule.budget import Gains, early_stop
from sglang_dspark.schedule.guarded import GuardedPlanner
from sglang_dspark.schedule.plan import Plan, base_of


class EarlyStopPlanner(GuardedPlanner):
    """Verify drafts of this step up to the first that does not pay."""

    def drafts(self, plan: Plan, survivals: Gains) -> int:
        """K by Algorithm 1 over this step's survivals, [R, gamma]."""
        return early_stop(
            survivals,
            self.costs.costs(plan.requests, plan.context, rising=True),
            self._workspace,
            limits=plan.limits,
            floors=plan.floors,
            base=base_of(plan.weights),
            depth=plan.budget.depth,
        ).drafts

    def describe(self) -> str:
        """By what it schedules, for the log's line at the start."""
        return f"{self.experience.signal}, algorithm early-stop"
