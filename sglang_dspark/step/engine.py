"""Schedule the steps of one server: each is planned from the results that have landed.

With overlap up to three steps are in flight: one computes, one is planned, one is handed out. No
value of a step is read before it has landed, so a plan of step t uses the steps up to t - lag
(paper, 3.2.2; `schedule/relay.py`), and no plan waits for a device.

A step's time is from its start to the next one's, by the clock of its device, so that it contains
every delay of a token; a step before a prefill has no time. The engine learns outcomes and times
when the next step begins or, while speculation is settled, in batches of BATCH steps: on a CPU a
pass over the model's weights evicts this code from all caches, and the second step of a batch
costs a fraction of the first.

Planning takes time too, so up to REPEATS steps in a row reuse a plan: an older plan has less
information, so results stay lossless (docs/losslessness.md). Without drafts, nothing is learned
from these steps. With drafts, up to FEW requests reuse a plan: confidences of so few blocks are old
when they are read, so reading them less often loses little.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from sglang_dspark.schedule.budget import Counts, Gains, plain
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.online import LOGIT_LIMIT, Floats, OnlineCalibration
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.schedule.planner_protocol import Planner
from sglang_dspark.serving.fallbacks import Fallback
from sglang_dspark.serving.metrics import StepMetrics
from sglang_dspark.serving.speed_targets import SpeedTargets
from sglang_dspark.step.drafter_fit import DrafterFit
from sglang_dspark.step.engine_protocol import GREEDY, Engine, Step, StepRequests
from sglang_dspark.step.timing import Clock, Mark

logger = logging.getLogger(__name__)

BATCH = 4  # steps of settled speculation that are learned from together
REPEATS = 3  # steps in a row that reuse a plan
FEW = 2  # most requests of a plan with drafts that is reused
PIPELINE = 3  # most steps in flight; a result with as many later steps is late
MOST_AWAITED = 256  # steps in flight; beyond them the oldest result is no longer awaited


class ScheduleEngine(Engine):
    """Plan the steps of one worker; called by one thread."""

    def __init__(
        self,
        planner: Planner,
        calibration: OnlineCalibration,
        metrics: StepMetrics,
        clock: Clock,
        fit: DrafterFit,
        speeds: SpeedTargets,
        floor: int = 0,
    ) -> None:
        """Time the steps by `clock`, and watch their first drafts by `fit`.

        floor: drafts of every request in a step that drafts, at any confidence.
        """
        self.planner = planner
        self.gamma = planner.gamma
        self.calibration = calibration
        self.metrics = metrics
        self._clock = clock
        self._fit = fit
        self._floor = min(floor, planner.gamma)
        self._speeds = speeds
        self._generation: Counts = np.empty(0, np.int64)  # of the pool's rows; a view of SGLang's
        self._number = 0
        self._steps: deque[Step] = deque()  # in flight, in the order of their plans
        self._interrupted = True
        self._repeats = 0  # steps that reused the newest plan
        self._unlearned: list[Step] = []
        self._logged: set[Fallback] = set()
        self._ended: set[str] = set()  # requests that had ended in the step last handed out

    def begin(self, requests: StepRequests, *, starts: bool = True) -> Step:
        """Plan a decode step; arguments as for `Engine.begin`."""
        now = self._clock.mark() if starts else None
        last = self._steps[-1] if self._steps else None
        if starts and last is not None:
            self._end(last, now)
        self._learn_landed()
        if last is not None and self._reuses(last, requests, starts=starts):
            step = self._repeat(last)
        else:
            step = self._planned(requests)
        self._steps.append(step)
        if starts:
            step.began, self._interrupted = now, False
        return step

    def _reuses(self, last: Step, requests: StepRequests, *, starts: bool) -> bool:
        """Return whether the next step reuses the newest step's plan; one that explores is not."""
        plan, rows = last.plan, requests.rows.numpy()
        same = plan.settled and plan.requests == len(rows)
        if not same or self._interrupted or self._repeats >= REPEATS:
            return False
        if plan.mode in (Mode.PLAIN, Mode.OFF):
            return True
        # Few requests with a confidence each, in the same order, no weights and no limits. A plan
        # that is made ahead, while the previous step computes, delays no step.
        return (
            starts
            and requests.limits is None
            and not last.limited
            and plan.weights is None
            and plan.mode is Mode.SPECULATE
            and plan.budget.drafts > 0
            and plan.known == plan.requests <= FEW
            and bool((rows == last.rows).all())
            and bool((requests.generation.numpy()[rows] == last.generations).all())
        )

    def _repeat(self, last: Step) -> Step:
        """Make a step with the newest step's plan; the engine learns from it only if it drafts."""
        self._repeats += 1
        if not last.plan.speculates:
            return Step(last.plan, last.rows, last.generations, repeated=True)
        plan = self.planner.again(last.plan, self._number)
        self._number += 1
        return Step(plan, last.rows, last.generations)

    def start(self, step: Step) -> None:
        """Start the newest step's time, and end the previous one's."""
        assert step is self._steps[-1], "steps start in the order in which they were planned"
        now = self._clock.mark()
        if len(self._steps) > 1:
            self._end(self._steps[-2], now)
        step.began, self._interrupted = now, False

    def _planned(self, requests: StepRequests) -> Step:
        self._generation, limits = requests.generation.numpy(), requests.limits
        slots, generations = requests.slots()
        weights = self._speeds.weights(slots, generations)
        context = int(requests.seq_lens.sum())
        if limits is not None and not limits.any():
            plan = self._undraftable(context, limits)
        elif self._fit.rests():
            plan = self._undraftable(context, np.zeros(len(slots), np.int64), Mode.OFF)
        else:
            floors = np.full(len(slots), self._floor) if self._floor else None
            if floors is not None and limits is not None:
                floors = np.minimum(floors, limits)
            plan = self.planner.plan(
                self._number, slots, generations, context,
                weights=weights, limits=limits, floors=floors, examine=self._fit.examines(),
            )  # fmt: skip
        self._number += 1
        self._repeats = 0
        return Step(plan, slots, generations, limited=limits is not None)

    def _undraftable(self, context: int, limits: Counts, mode: Mode = Mode.PLAIN) -> Plan:
        """Plan a step in which no request may have a draft; the guard is not used.

        mode OFF: coming steps have none either, and the step's time updates plain decoding's.
        """
        requests = len(limits)
        budget = plain(requests, self.planner.costs.costs(requests, context))
        return Plan(
            self._number, requests, context, budget, limits, None,
            mode, settled=mode is Mode.OFF, known=0, gain=0.0,
        )  # fmt: skip

    def _end(self, last: Step, now: Mark) -> None:
        """End a step's time; it has none if something else ran after it."""
        last.over, last.ended = True, None if self._interrupted else now

    def admit(self, step: Step, logits: Tensor | None) -> Counts:
        """Return verify lengths l_r, [R] int64; arguments as for `Engine.admit`."""
        if step.plan.speculates:
            assert logits is not None, "a draft has confidences"
            step.logits = logits.numpy()
            confidence = np.zeros((len(step.rows), self.gamma), np.float32)
            step.confidence = self.calibration.confidence(
                step.logits, _regimes(step), confidence, (step.rows, step.generations)
            )
            self._publish(step, step.logits, step.confidence)
        return self.planner.admit(step.plan, step.confidence)

    def calibrate(self, step: Step) -> tuple[Floats, Floats]:
        """Return slopes and shifts [R, gamma] of the logits, by which a device admits."""
        step.calibrated_by = self.calibration.lines(_regimes(step), (step.rows, step.generations))
        return step.calibrated_by

    def skip_draft(self, step: Step, *, failed: bool) -> None:
        """Decode a step without its planned draft: it failed, or drafting rests after a failure."""
        step.plan, step.undrafted = step.plan.without_drafts(), True
        if failed:
            self.metrics.count_fallback(Fallback.DRAFT_FAILED)

    def landed(self, step: Step, lengths: Counts, accepted: Counts) -> None:
        """Store a step's result that is on the host: [R] int64 lengths and accepted drafts."""
        step.outcome = lengths, accepted
        overtaken = next((n for n, each in enumerate(reversed(self._steps)) if each is step), 0)
        if overtaken >= PIPELINE:
            self._log_fallback(
                Fallback.RESULT_LATE, "a step's result came late; plans were made without it"
            )
        if step.arriving is not None and step.calibrated_by is not None:
            step.logits = step.arriving.float().numpy()
            step.confidence = confidence_by(step.logits, *step.calibrated_by)
            self._publish(step, step.logits, step.confidence)

    def processed(self, reqs: Sequence[Any], accepted: Sequence[int], speculated: bool) -> None:
        """Count the tokens of a step that is handed out: its requests, accepted drafts of each.

        Tokens after an answer's end are counted as lost, as are those of a request that ended in
        the step before: results are read when the next step has been launched.
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
        self._speeds.handed_out(reqs, self._generation)
        delivered = self.planner.delivered
        delivered.emitted(speculated, len(accepted) + sum(accepted))
        if lost:
            delivered.lost(speculated, lost)
        if len(ended) == len(reqs):
            self._all_ended()

    def interrupted(self) -> None:
        """Discard the time of the last step: a prefill, or anything but a decode step, ran."""
        self._interrupted = True

    def _publish(self, step: Step, logits: Gains, confidence: Gains) -> None:
        """Pass confidences [R, gamma] to later plans; log logits [R, d] that are invalid."""
        if not np.isfinite(logits).all():
            self._log_fallback(
                Fallback.NO_CONFIDENCE,
                "the drafter's confidence is not a number for some drafts; they are not verified. "
                "With --dtype float16, try --dtype float32",
            )
        self.planner.publish(step.plan, step.rows, step.generations, confidence)

    def _log_fallback(self, fallback: Fallback, line: str) -> None:
        """Count a fallback each time, and log it the first time."""
        self.metrics.count_fallback(fallback)
        if fallback not in self._logged:
            self._logged.add(fallback)
            logger.warning("sglang-dspark: %s", line)

    def _learn_landed(self) -> None:
        """Learn, now or soon, from the steps that are over and whose outcome is on the host."""
        while self._steps and self._steps[0].over:
            # Results land in the order of their steps: one that is overtaken never comes.
            landed = any(each.outcome is not None for each in self._steps)
            if not landed and len(self._steps) <= MOST_AWAITED:
                break
            step = self._steps.popleft()
            if step.outcome is None:
                self._log_fallback(
                    Fallback.RESULT_LOST, "a step's result never came; nothing is learned from it"
                )
                continue
            self._unlearned.append(step)
            if len(self._unlearned) >= BATCH or step.plan.mode is not Mode.SPECULATE:
                self._learn_all()
                self.metrics.flush(time.monotonic())

    def _all_ended(self) -> None:
        """Learn from all steps and flush: every request has ended, and the server may be idle.

        With overlap the step in flight, of the same requests, is handed out after this.
        """
        self._interrupted = True
        if self._steps and self._steps[-1].outcome is not None:
            self._steps[-1].over = True
        self._learn_landed()
        self._learn_all()
        self.metrics.hand_over()

    def _learn_all(self) -> None:
        for step in self._unlearned:
            self._learn(step)
        self._unlearned = []

    def _learn(self, step: Step) -> None:
        if step.made_up:
            return
        assert step.outcome is not None
        lengths, accepted = step.outcome
        if step.undrafted:
            self.metrics.step(step.plan, lengths, accepted, None, undrafted=True)
            return
        seconds = self._seconds(step)
        if not step.repeated:
            self.planner.finished(
                step.plan, step.rows, step.generations, accepted, lengths, step.confidence, seconds
            )
        if step.logits is not None:
            self.calibration.observe(
                step.logits, _regimes(step), accepted, lengths,
                (step.rows, step.generations), step.confidence,
            )  # fmt: skip
        self.metrics.step(step.plan, lengths, accepted, seconds)
        if step.plan.speculates:
            self._fit.observe(step.rows, step.generations, accepted, lengths)

    def _seconds(self, step: Step) -> float | None:
        if step.began is None or step.ended is None:
            return None
        seconds = self._clock.seconds(step.began, step.ended)
        if seconds is None or (seconds > 0 and math.isfinite(seconds)):
            return seconds
        self._log_fallback(
            Fallback.NO_TIME, f"a step took {seconds:g} s by its clock; nothing is learned from it"
        )
        return None


def _regimes(step: Step) -> Counts:
    return np.full(len(step.rows), GREEDY) if step.regimes is None else step.regimes


def confidence_by(logits: Gains, slopes: Floats, shifts: Floats) -> Gains:
    """Return sigmoid(slope * logit + shift), [R, gamma] float32; 0 where a logit is NaN."""
    bounded = np.clip(logits.astype(np.float64), -LOGIT_LIMIT, LOGIT_LIMIT)
    values = 1.0 / (1.0 + np.exp(-(slopes * bounded + shifts)))
    return np.where(np.isfinite(logits), values, np.float32(0.0)).astype(np.float32)
