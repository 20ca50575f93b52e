"""The planner of the search: K is the plan's, fixed before drafting by the confidences known then.

`plan` reads finished steps only; `admit` turns a K that was fixed before drafting into verify
lengths. That split is what makes the schedule lossless (docs/losslessness.md; paper, 3.2.2).
"""

from __future__ import annotations

from sglang_dspark.schedule.budget import Gains
from sglang_dspark.schedule.guarded import GuardedPlanner
from sglang_dspark.schedule.plan import Plan


class SearchPlanner(GuardedPlanner):
    """Verifies the K drafts that promised the most tokens per second before they were drafted."""

    def drafts(self, plan: Plan, survivals: Gains) -> int:
        """K of the plan, whatever was drafted."""
        return plan.budget.drafts

    def describe(self) -> str:
        """By what it schedules, for the log's line at the start."""
        return f"{self.experience.signal}, algorithm search"
