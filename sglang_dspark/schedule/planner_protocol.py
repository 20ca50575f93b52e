"""Define the planner protocol; `guarded`, `early_stop` and `static_threshold` implement it.

    plan     before drafting: choose the depth (0 skips the draft) and how many to admit (K)
    admit    after drafting: choose the drafts to verify, by the survivals of this step
    publish  pass this step's confidences to the plans of later steps
    finished learn outcomes and the time of a step

Everything is deterministic in the calls made: ranks that make equal calls decide alike. As measured
times differ by rank, one rank calls `plan` and the others receive its `Plan`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from sglang_dspark.schedule.budget import Counts, Gains
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.experience import Experience
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.schedule.wasted_tokens import Delivered


class Planner(Protocol):
    """The scheduler of one engine (or of the rank that decides for all)."""

    experience: Experience

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
        """Plan step `step` for R >= 1 requests in pool rows `rows`.

        rows, generations: [R] int64. context: tokens of context of all requests together.
        weights: [R] float32 (`gains.speed_weights`). limits, floors: [R] int64, most and least
        drafts of each. relay_arrived: False uses the prior for all requests (on all ranks).
        examine: True verifies a draft of each request, also where that does not pay.
        """
        ...

    def again(self, plan: Plan, step: int) -> Plan:
        """Return the newest plan for step `step` too, with the same requests and no new inputs."""
        return replace(plan, step=step)

    def admit(self, plan: Plan, confidence: Gains | None) -> Counts:
        """Return verify lengths l_r, [R] int64, of a planned step after its drafting.

        confidence: [R, gamma] float32 of this step, calibrated; entries beyond the planned depth
        are not read. None if the step did not draft.
        """
        ...

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
        """Learn from a step: [R] int64 drafts accepted and verified; seconds without prefill.

        confidence: [R, gamma], the input of `admit`. seconds None: the step also prefilled or was
        not timed; only outcomes are learned.
        """
        ...

    def renew(self) -> None:
        """Forget measurements of old weights, because target or drafter have new ones."""
        return None

    def describe(self) -> str:
        """Describe the basis of the schedule, for the log's line at the start."""
        ...

    @property
    def fallbacks(self) -> int:
        """Return how often a load fell back to plain decoding."""
        ...

    @property
    def gamma(self) -> int:
        """Return the number of drafts that the drafter proposes."""
        return self.experience.gamma

    @property
    def costs(self) -> CostModel:
        """Return the step times, as profiled and corrected."""
        return self.experience.costs

    @property
    def delivered(self) -> Delivered:
        """Return the shares of emitted tokens that are delivered."""
        return self.experience.delivered

    def publish(self, plan: Plan, rows: Counts, generations: Counts, confidence: Gains) -> None:
        """Pass a step's calibrated confidences to later plans: [R], [R], [R, gamma] float32."""
        self.experience.publish(plan, rows, generations, confidence)
