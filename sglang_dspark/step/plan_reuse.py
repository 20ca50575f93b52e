"""Reuse a plan for the steps that follow: a step takes milliseconds, and planning adds to it.

Without drafts, one step in `1 + MOST` is planned and learned from. With one or two requests that
draft, as many steps share a plan, and the engine learns from each: K depends on the confidences of
one or two blocks, which are old when they are read, so reading them less often loses little.
Losslessness is unchanged: an older plan has less information (docs/losslessness.md). A plan that is
made ahead, while the previous step computes, delays no step, so such steps never share a plan.
"""

from __future__ import annotations

from torch import Tensor

from sglang_dspark.schedule.budget import Counts
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.step.engine_protocol import Step

MOST = 3  # steps in a row that reuse a plan
FEW = 2  # most requests of a plan with drafts that is reused


class PlanReuse:
    """Count the steps that reused the newest plan."""

    def __init__(self) -> None:
        self._made = 0

    def planned(self) -> None:
        """Reset the count: a step was planned."""
        self._made = 0

    def again(
        self,
        last: Step,
        rows: Tensor,
        generation: Tensor,
        limits: Counts | None,
        *,
        starts: bool,
    ) -> bool:
        """Return whether the next step reuses the newest step's plan; no other work ran since.

        rows [R], generation of the pool's rows, limits [R], starts: as for the next step's plan.
        A plan that explores is not reused.
        """
        plan, slots = last.plan, rows.numpy()
        same = plan.settled and plan.requests == len(slots)
        if same and plan.mode not in (Mode.PLAIN, Mode.OFF):
            # Few requests with a confidence each, in the same order, no weights and no limits.
            same = (
                starts
                and limits is None
                and not last.limited
                and plan.weights is None
                and plan.mode is Mode.SPECULATE
                and plan.budget.drafts > 0
                and plan.known == plan.requests <= FEW
                and bool((slots == last.rows).all())
                and bool((generation.numpy()[slots] == last.generations).all())
            )
        if not same or self._made >= MOST:
            return False
        self._made += 1
        return True
