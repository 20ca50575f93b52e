"""Plan by search: K is fixed before drafting by the confidences known then.

`plan` reads finished steps only; `admit` turns a K that was fixed before drafting into verify
lengths. That split is what makes the schedule lossless (docs/losslessness.md; paper, 3.2.2).
"""

from __future__ import annotations

from sglang_dspark.schedule.budget import Gains
from sglang_dspark.schedule.guarded import GuardedPlanner
from sglang_dspark.schedule.plan import Plan


class SearchPlanner(GuardedPlanner):
    """Verify the K drafts that promised the most tokens/s before they were drafted."""

    def drafts(self, plan: Plan, survivals: Gains) -> int:
        """Return K of the plan; the drafts have no influence."""
        return plan.budget.drafts

    def describe(self) -> str:
        """By what it schedules, for the log's line at the start."""
        return f"{self.experience.signal}, algorithm search"
