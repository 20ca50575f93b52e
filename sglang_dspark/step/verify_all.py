"""Draft gamma positions in every step and verify all of them: `schedule.mode: static`.

Nothing is measured or learned. Of several ranks the leader has it, and the others follow its plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from sglang_dspark.schedule.budget import Budget, Counts
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.online import Floats
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.step.engine import Step


class VerifyAll:
    """An engine (as `ScheduleEngine`) without a schedule."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self._number = 0

    def begin(
        self,
        rows: Tensor,
        generation: Tensor,
        seq_lens: Tensor,
        *,
        starts: bool = True,
        limits: Counts | None = None,
    ) -> Step:
        """Plan a decode step, as `ScheduleEngine.begin`; limits: [R] int64, or None for gamma."""
        slots = rows.numpy().astype(np.int64)
        most = np.full(len(slots), self.gamma, np.int64) if limits is None else limits
        drafts = int(most.sum())
        budget = Budget(drafts, self.gamma if drafts else 0, 0.0, 0.0)
        plan = Plan(
            self._number, len(slots), int(seq_lens.sum()), budget, most, None,
            Mode.SPECULATE, settled=True, known=0, gain=1.0,
        )  # fmt: skip
        self._number += 1
        return Step(plan, slots, generation.numpy()[slots], limited=limits is not None)

    def admit(self, step: Step, logits: Tensor | None, greedy: Tensor | None) -> Counts:
        """Verify lengths l_r, [R] int64: all that the requests allow; 0 without a draft."""
        return step.plan.limits if step.plan.speculates else np.zeros_like(step.plan.limits)

    def leave_out_draft(self, step: Step, *, failed: bool) -> None:
        """A planned draft came to nothing."""
        step.plan, step.undrafted = step.plan.without_drafts(), True

    def start(self, step: Step) -> None:
        """Steps are not timed."""

    def calibrate(self, step: Step, greedy: Tensor | None) -> tuple[Floats, Floats]:
        """An accelerator serves this mode by SGLang's own step."""
        raise AssertionError("only a host admits without a schedule")

    def landed(self, step: Step, lengths: Counts, accepted: Counts) -> None:
        """Outcomes teach nothing."""

    def processed(self, reqs: Sequence[Any], accepted: Sequence[int], speculated: bool) -> None:
        """Nor does what was handed out."""

    def interrupted(self) -> None:
        """Nor a prefill."""
