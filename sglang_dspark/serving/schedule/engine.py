"""The scheduler of one server: what the seams of a decode step ask, in the order they ask it.

    begin     the step's requests are known, nothing is drafted: plan (and close the step before)
    drafted   this step's confidence logits are known: admit, publish
    outcome   accepted drafts are known
    processed tokens were handed out; where every request has ended, all that was kept is counted
    interrupted  something else than a decode step ran

While a load is found to be better off without drafts, one step in `1 + REST` is planned and learned
from, and the others go on as it did: at a few milliseconds a step even thinking costs.

A step's time runs from its `begin` to the next one's, so that it holds all that a token waits for;
a step that was followed by a prefill has no time. Confidences reach the planner a step later, under
the overlap loop two (`schedule/relay.py`), outcomes and times when the next step begins or, while
speculation is settled, in batches of a few steps: after a pass over the model's weights nothing of
this code is in a cache, and the second step of a batch costs a fraction of the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sglang_dspark.schedule.budget import Counts, Gains
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.planner import Plan, StepPlanner
from sglang_dspark.serving.schedule.metrics import StepMetrics
from sglang_dspark.serving.schedule.speed import SpeedTargets

logger = logging.getLogger(__name__)

GREEDY, SAMPLED = 0, 1  # regimes of the calibration
REST = 3  # steps of a plain phase that repeat the plan before them
BATCH = 4  # steps of settled speculation that are learned from together


@dataclass
class _Step:
    """The step in flight."""

    plan: Plan
    rows: Counts
    tenants: Counts
    began: float
    resting: bool = False  # repeats the plan before it, and teaches nothing
    lengths: Counts | None = None
    accepted: Counts | None = None
    seconds: float | None = None
    confidence: Gains | None = None
    logits: Gains | None = None
    regimes: Counts | None = None


class ScheduleEngine:
    """Plans the steps of one worker; called by one thread."""

    def __init__(
        self,
        planner: StepPlanner,
        calibration: OnlineCalibration,
        metrics: StepMetrics,
        clock: Callable[[], float],
        floor: int = 0,
        speeds: SpeedTargets | None = None,
    ) -> None:
        """clock: seconds that steps cost, of the thread that calls.

        floor: drafts that every request gets in a step that drafts, however little they promise.
        speeds: targets of the requests; None: requests have none.
        """
        self.planner = planner
        self.gamma = planner.gamma
        self.calibration = calibration
        self.metrics = metrics
        self._clock = clock
        self._floor = min(floor, planner.gamma)
        self._speeds = speeds
        self._generation: Counts | None = None  # of the pool's rows, a view that stays up to date
        self._number = 0
        self._step: _Step | None = None
        self._interrupted = True
        self._rested = 0
        self._unlearned: list[_Step] = []
        self._warned = False  # that confidences were no numbers
        self._ended: set[str] = set()  # requests found to have ended in the step last handed out

    def begin(self, rows: Tensor, generation: Tensor, seq_lens: Tensor) -> Plan:
        """Plan a decode step: rows [R] of the pool, the pool's generations, context lengths [R]."""
        now = self._clock()
        last = self._step
        self._finish(now)
        if last is not None and self._rests(last.plan, len(rows)):
            self._step = _Step(last.plan, last.rows, last.tenants, now, resting=True)
            return last.plan
        seats = rows.numpy().astype(np.int64)
        self._generation = generation.numpy()
        tenants = self._generation[seats]
        floors = np.full(len(seats), self._floor) if self._floor else None
        weights = self._speeds.weights(seats, tenants) if self._speeds is not None else None
        context = int(seq_lens.sum())
        plan = self.planner.plan(
            self._number, seats, tenants, context, weights=weights, floors=floors
        )
        self._number += 1
        self._rested = 0
        self._step = _Step(plan, seats, tenants, now)
        self._interrupted = False
        return plan

    def planned(self) -> Plan | None:
        """The plan of a step that has begun and whose lengths are not asked for yet."""
        step = self._step
        return step.plan if step is not None and step.lengths is None else None

    def _rests(self, plan: Plan, requests: int) -> bool:
        """Whether the coming step repeats a plain phase's plan; not one that others only visit."""
        plain = plan.mode is Mode.PLAIN and plan.settled
        same = plain and plan.requests == requests and not self._interrupted
        if not same or self._rested >= REST:
            return False
        self._rested += 1
        return True

    def drafted(self, logits: Tensor | None, greedy: Tensor | None) -> Counts:
        """Verify lengths l_r, [R] int64, of the step that was planned.

        logits: [R, d] float32 confidence logits of the drafted positions; None for a drafter
        without a head, or when nothing was drafted. greedy: [R] bool, requests that take the
        likeliest token.
        """
        step = self._require()
        plan, planner = step.plan, self.planner
        if plan.speculates:
            step.confidence = self._confidence(step, logits, greedy)
            if logits is not None:
                planner.publish(plan, step.rows, step.tenants, step.confidence)
        step.lengths = planner.admit(plan, step.confidence)
        return step.lengths

    def outcome(self, accepted: Tensor) -> None:
        """Accepted drafts [R] of the step."""
        self._require().accepted = accepted.numpy().astype(np.int64)

    def processed(self, reqs: Sequence[Any], accepted: Sequence[int], speculated: bool) -> None:
        """A step's tokens were handed out: its requests (upstream's), accepted drafts of each.

        What lay behind an answer's end is counted as lost, and so is all that a request emitted
        that had ended before: results are read when the next step is on its way.
        """
        ended: set[str] = set()
        lost = 0
        for req, drafts in zip(reqs, accepted, strict=True):
            if req.finished():
                if req.rid in self._ended:
                    lost += drafts + 1
                elif req.finished_len is not None:
                    lost += max(len(req.output_ids) - req.finished_len, 0)
                ended.add(req.rid)
        self._ended = ended
        if self._speeds is not None and self._generation is not None:
            self._speeds.handed_out(reqs, self._generation)
        delivered = self.planner.delivered
        delivered.emitted(speculated, len(accepted) + sum(accepted))
        if lost:
            delivered.lost(speculated, lost)
        if len(ended) == len(reqs):
            self._rest()

    def interrupted(self) -> None:
        """A prefill, or anything but a decode step, ran: the step before it has no time."""
        self._interrupted = True

    @property
    def lengths(self) -> Counts:
        """l_r of the step in flight."""
        lengths = self._require().lengths
        assert lengths is not None, "lengths are read before the drafts were made"
        return lengths

    def _confidence(self, step: _Step, logits: Tensor | None, greedy: Tensor | None) -> Gains:
        if logits is None:
            return self.planner.expected(step.rows, step.tenants)
        step.logits = logits.numpy()
        if not self._warned and np.isnan(step.logits).any():
            self._warned = True
            logger.warning(
                "sglang-dspark: the drafter's confidence is not a number for some drafts; they "
                "are not verified. With --dtype float16, try --dtype float32"
            )
        if greedy is None:
            step.regimes = np.zeros(len(step.rows), np.int64)
        else:
            step.regimes = np.where(greedy.numpy(), GREEDY, SAMPLED).astype(np.int64)
        confidence = np.zeros((len(step.rows), self.gamma), np.float32)
        seats = (step.rows, step.tenants)
        return self.calibration.confidence(step.logits, step.regimes, confidence, seats)

    def _finish(self, now: float) -> None:
        """Learn from the step in flight, now or soon, if it got as far as an outcome."""
        step, self._step = self._step, None
        if step is None or step.accepted is None or step.lengths is None:
            return
        step.seconds = None if self._interrupted else now - step.began
        self._unlearned.append(step)
        if len(self._unlearned) >= BATCH or step.plan.mode is not Mode.SPECULATE:
            self._learn_all()
            self.metrics.flush(now)

    def _rest(self) -> None:
        """Every request of a step has ended: nothing may come for long, so nothing is kept back.

        Under the overlap loop the step in flight, of the same requests, is handed out after this.
        """
        self._interrupted = True
        if self._step is not None and self._step.accepted is not None:
            self._finish(self._clock())
        self._learn_all()
        self.metrics.hand_over()

    def _learn_all(self) -> None:
        for step in self._unlearned:
            self._learn(step)
        self._unlearned = []

    def _learn(self, step: _Step) -> None:
        accepted, lengths = step.accepted, step.lengths
        assert accepted is not None
        assert lengths is not None
        if not step.resting:
            self.planner.finished(
                step.plan,
                step.rows,
                step.tenants,
                accepted,
                lengths,
                step.confidence,
                step.seconds,
            )
        if step.logits is not None and step.regimes is not None:
            self.calibration.observe(
                step.logits, step.regimes, accepted, lengths,
                (step.rows, step.tenants), step.confidence,
            )  # fmt: skip
        self.metrics.step(step.plan, lengths, accepted, step.seconds)

    def _require(self) -> _Step:
        assert self._step is not None, "a decode step must begin before it goes on"
        return self._step


def pool_of(worker: Any) -> Any:
    """The request pool whose rows and generations the relay is tagged with."""
    return worker.model_runner.req_to_token_pool
