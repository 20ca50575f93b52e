"""Which steps go by the plan before them: where a step has milliseconds even thinking costs.

While a load is found to be better off without drafts, one step in `1 + MOST` is planned and learned
from. Of one or two requests that draft as many steps share a plan, and each is learned from: its K
rests on the confidences of one or two blocks, old when they are read, so little is lost by reading
them less often. It is as lossless: an older plan knows less (docs/losslessness.md). Plans that are
made ahead, while the step before computes, cost nobody time, so each of those steps has its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sglang_dspark.schedule.budget import Counts
from sglang_dspark.schedule.guard import Mode

if TYPE_CHECKING:
    from sglang_dspark.step.engine import Step

MOST = 3  # steps in a row that go by the plan before them
FEW = 2  # requests up to which steps that draft do


class Repeats:
    """How many steps the newest plan served beyond its own."""

    def __init__(self) -> None:
        self._made = 0

    def planned(self) -> None:
        """A step was planned."""
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
        """Whether the coming step goes by the plan of the newest one, behind which nothing ran.

        rows [R], generation of the pool's rows, limits [R], starts: as for the coming step's plan.
        A plan that others only visit serves its own step alone.
        """
        plan = last.plan
        same = plan.settled and plan.requests == len(rows)
        if same and plan.mode is not Mode.PLAIN:
            same = starts and limits is None and _serves(last)
            same = same and _seated(last, rows, generation)
        if not same or self._made >= MOST:
            return False
        self._made += 1
        return True


def _serves(step: Step) -> bool:
    """Whether the plan of a step may be the next one's too: with drafts, of few requests, each with
    a confidence of its own, all of which count alike."""
    plan = step.plan
    drafts = plan.mode is Mode.SPECULATE and plan.budget.drafts > 0
    alike = plan.weights is None and not step.limited
    return drafts and alike and plan.known == plan.requests <= FEW


def _seated(last: Step, rows: Tensor, generation: Tensor) -> bool:
    """Whether these are the newest step's requests, in its order."""
    seats = rows.numpy()
    return bool((seats == last.rows).all() and (generation.numpy()[seats] == last.tenants).all())
