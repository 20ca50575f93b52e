"""Define the scheduler's interface to the step, and the scheduler of `schedule.mode: static`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sglang_dspark.schedule.budget import Budget, Counts, Gains
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.online import Floats
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.step.drafter_fit import DrafterFit
from sglang_dspark.step.timing import Mark

GREEDY, SAMPLED = 0, 1  # regimes of the calibration


class StepRequests(NamedTuple):
    """Requests of a step to plan; all tensors are on the host.

    rows: [R] int64 of the pool. generation: of every row of the pool, int64. seq_lens: [R] context
    lengths. limits: [R] int64, most drafts of each request; None: gamma.
    """

    rows: Tensor
    generation: Tensor
    seq_lens: Tensor
    limits: Counts | None = None

    def slots(self) -> tuple[Counts, Counts]:
        """Copy the rows and their generations, [R] int64 each."""
        rows = self.rows.numpy().astype(np.int64)
        return rows, self.generation.numpy()[rows]


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
    outcome: tuple[Counts, Counts] | None = None  # l_r and accepted drafts [R], on the host
    confidence: Gains | None = None  # [R, gamma] calibrated
    logits: Gains | None = None  # [R, d] confidence logits, of a head or estimated
    regimes: Counts | None = None  # [R] of the calibration; None: all are greedy
    calibrated_by: tuple[Floats, Floats] | None = None  # slopes and shifts given to a device
    arriving: Tensor | None = None  # [R, gamma] logits, on the host when the step's result is


class Engine:
    """Plan steps and learn from their results; methods in the order of a step.

    The default methods are those of an engine that only plans.
    """

    def begin(self, requests: StepRequests, *, starts: bool = True) -> Step:
        """Plan a decode step. starts: it is launched with this call, else by `start`."""
        raise NotImplementedError

    def start(self, step: Step) -> None:
        """Start the newest step's time: its work is launched."""

    def admit(self, step: Step, logits: Tensor | None) -> Counts:
        """Return verify lengths l_r, [R] int64.

        logits: [R, d] float32 confidence logits of the drafted positions, on the host; None when
        nothing was drafted.
        """
        raise AssertionError("the leader admits")

    def calibrate(self, step: Step) -> tuple[Floats, Floats]:
        """Return slopes and shifts [R, gamma] of the logits, by which a device admits.

        c = sigmoid(slope * logit + shift); a NaN logit has confidence 0. Only finished steps
        contribute.
        """
        raise AssertionError("only a host admits without a schedule")

    def skip_draft(self, step: Step, *, failed: bool) -> None:
        """Decode a step without its planned draft: it failed, or drafting rests."""
        raise AssertionError("with several ranks a planned draft is never skipped")

    def landed(self, step: Step, lengths: Counts, accepted: Counts) -> None:
        """Store a step's result that is on the host: [R] int64 lengths and accepted drafts."""

    def processed(self, reqs: Sequence[Any], accepted: Sequence[int], speculated: bool) -> None:
        """Count the tokens of a step that is handed out: its requests, accepted drafts of each."""

    def interrupted(self) -> None:
        """Discard the time of the last step: work other than a decode step ran."""


class VerifyAll(Engine):
    """Draft gamma positions in every step and verify all of them; log a drafter that does not fit.

    With several ranks only the leader has it; the others follow its plans.
    """

    def __init__(self, gamma: int, fit: DrafterFit | None = None) -> None:
        """Watch the first drafts by `fit`; None: do not watch them."""
        self.gamma = gamma
        self._fit = fit
        self._number = 0

    def begin(self, requests: StepRequests, *, starts: bool = True) -> Step:
        """Plan a decode step, as in `Engine.begin`."""
        rows, generations = requests.slots()
        limits = requests.limits
        most = np.full(len(rows), self.gamma, np.int64) if limits is None else limits
        drafts = int(most.sum())
        budget = Budget(drafts, self.gamma if drafts else 0, 0.0, 0.0)
        plan = Plan(
            self._number, len(rows), int(requests.seq_lens.sum()), budget, most, None,
            Mode.SPECULATE, settled=True, known=0, gain=1.0,
        )  # fmt: skip
        self._number += 1
        return Step(plan, rows, generations, limited=limits is not None)

    def admit(self, step: Step, logits: Tensor | None) -> Counts:
        """Return verify lengths l_r, [R] int64: all that the limits allow."""
        return step.plan.limits

    def skip_draft(self, step: Step, *, failed: bool) -> None:
        """Decode a step without its planned draft."""
        step.plan, step.undrafted = step.plan.without_drafts(), True

    def landed(self, step: Step, lengths: Counts, accepted: Counts) -> None:
        """Store a step's result that is on the host: [R] int64 lengths and accepted drafts."""
        step.outcome = lengths, accepted
        if self._fit is not None and not step.made_up:
            self._fit.observe(step.rows, step.generations, accepted, lengths)
