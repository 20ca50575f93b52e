"""Define the scheduler's interface to the step, and the scheduler of `schedule.mode: static`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from sglang_dspark.schedule.budget import Budget, Counts, Gains
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.online import Floats
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.step.timing import Mark

if TYPE_CHECKING:
    from sglang_dspark.step.drafter_fit import DrafterFit


@dataclass
class Step:
    """A step in flight. A field is None until its event has happened or its value has landed."""

    plan: Plan
    rows: Counts  # [R] of the pool
    generations: Counts  # [R] generations of the rows
    repeated: bool = False  # reuses a plan without drafts; nothing is learned from it
    undrafted: bool = False  # its draft failed or was skipped; nothing is learned from it
    limited: bool = False  # some requests had their own limits
    made_up: bool = False  # of the server's own warm-up; nothing is learned from it
    began: Mark | None = None
    ended: Mark | None = None
    over: bool = False  # another step has started, or all requests have ended
    lengths: Counts | None = None  # l_r [R]
    accepted: Counts | None = None  # [R]
    confidence: Gains | None = None  # [R, gamma] calibrated
    logits: Gains | None = None  # [R, d] confidence logits, of a head or estimated
    regimes: Counts | None = None  # [R]
    calibrated_by: tuple[Floats, Floats] | None = None  # slopes and shifts given to a device
    arriving: Tensor | None = None  # [R, gamma] logits, on the host when the step's result is

    @property
    def has_landed(self) -> bool:
        """Return whether the step's outcome is on the host."""
        return self.accepted is not None and self.lengths is not None


class Engine(Protocol):
    """Plan steps and learn from their results.

    The default methods are those of an engine that only plans.
    """

    def begin(
        self,
        rows: Tensor,
        generation: Tensor,
        seq_lens: Tensor,
        *,
        starts: bool = True,
        limits: Counts | None = None,
    ) -> Step:
        """Plan a decode step: rows [R] of the pool, the pool's generations, context lengths [R].

        All are host tensors. starts: whether the step is launched with this call, else by `start`.
        limits: [R] int64, most drafts of each request; None: gamma.
        """
        ...

    def start(self, step: Step) -> None:
        """Start the newest step's time: its work is launched."""
        return

    def admit(self, step: Step, logits: Tensor | None, greedy: Tensor | None) -> Counts:
        """Return verify lengths l_r, [R] int64.

        logits: [R, d] float32 confidence logits of the drafted positions, of a head or estimated,
        on the host; None when nothing was drafted. greedy: [R] bool, requests that decode greedily;
        None: every request.
        """
        raise AssertionError("the leader admits")

    def calibrate(self, step: Step, greedy: Tensor | None) -> tuple[Floats, Floats]:
        """Return slopes and shifts [R, gamma] of the logits, by which a device admits.

        greedy: [R] bool on the host; None: every request. c = sigmoid(slope * logit + shift); a NaN
        logit has confidence 0. Only finished steps contribute.
        """
        raise AssertionError("only a host admits without a schedule")

    def skip_draft(self, step: Step, *, failed: bool) -> None:
        """Decode a step without its planned draft: it failed, or drafting rests."""
        raise AssertionError("with several ranks a planned draft is never skipped")

    def landed(self, step: Step, lengths: Counts, accepted: Counts) -> None:
        """Store a step's result that is on the host: [R] int64 lengths and accepted drafts."""
        return

    def processed(self, reqs: Sequence[Any], accepted: Sequence[int], speculated: bool) -> None:
        """Count the tokens of a step that is handed out: its requests, accepted drafts of each."""
        return

    def interrupted(self) -> None:
        """Discard the time of the last step: work other than a decode step ran."""
        return


class VerifyAll(Engine):
    """Draft gamma positions in every step and verify all of them.

    It measures and learns nothing, but logs a drafter that does not fit. With several ranks only
    the leader has it; the others follow its plans.
    """

    def __init__(self, gamma: int, fit: DrafterFit | None = None) -> None:
        """Watch the first drafts by `fit`; None: do not watch them."""
        self.gamma = gamma
        self._fit = fit
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
        """Plan a decode step, as in `Engine.begin`; limits: [R] int64, or None for gamma."""
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
        """Return verify lengths l_r, [R] int64: all that the limits allow; 0 without drafts."""
        return step.plan.limits if step.plan.speculates else np.zeros_like(step.plan.limits)

    def skip_draft(self, step: Step, *, failed: bool) -> None:
        """Decode a step without its planned draft."""
        step.plan, step.undrafted = step.plan.without_drafts(), True

    def landed(self, step: Step, lengths: Counts, accepted: Counts) -> None:
        """Store a step's result that is on the host: [R] int64 lengths and accepted drafts."""
        step.lengths, step.accepted = lengths, accepted
        if self._fit is not None and not step.made_up:
            self._fit.observe(step)
