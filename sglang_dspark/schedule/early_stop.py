"""Plan by the paper's Algorithm 1: K is chosen after the step's drafting (lag 0).

Drafts are admitted in the order of their own survivals until the first that would lower Theta, so
no lag is needed. The plan's limits, floors, weights and depth apply; its K is an expectation.
"""

from __future__ import annotations

from sglang_dspark.schedule.budget import Gains, early_stop
from sglang_dspark.schedule.guarded import GuardedPlanner
from sglang_dspark.schedule.plan import Plan, base_of


class EarlyStopPlanner(GuardedPlanner):
    """A planner that verifies this step's drafts until the first that would lower Theta."""

    def drafts(self, plan: Plan, survivals: Gains) -> int:
        """Return K by Algorithm 1 over this step's survivals, [R, gamma]."""
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
        """Describe the signal and the algorithm, for the log's line at the start."""
        return f"{self.experience.signal}, algorithm early-stop"
