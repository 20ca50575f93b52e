"""One step's decisions, from what earlier steps left behind: the pure core behind the server.

    plan     before drafting: skip the draft, or draft how deep and admit how many (K)
    admit    after drafting: which drafts, by the survivals of this step
    publish  this step's confidences, for the plans of later steps
    finished outcomes and the time they took

`plan` reads finished steps only, through a relay that lags; `admit` turns a K that was fixed before
drafting into verify lengths. That split is what makes the schedule lossless (docs/losslessness.md).
With `early_stop` K is found by Algorithm 1 in `admit` instead (lag 0), which needs no lag; depth,
limits, floors, weights and whether to draft stay the plan's, and its K is only what is expected.

Everything is deterministic in the calls made: ranks that make equal calls decide alike. Where
measured times differ by rank, one rank calls `plan` and the others are told its `Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import (
    Budget,
    Costs,
    Counts,
    Gains,
    Workspace,
    early_stop,
    plain,
    search,
)
from sglang_dspark.schedule.cost_model import CostModel, Step
from sglang_dspark.schedule.delivered import Delivered
from sglang_dspark.schedule.early_exit import EarlyExit, ExitConfig
from sglang_dspark.schedule.estimator import AcceptanceEstimator, EstimatorConfig
from sglang_dspark.schedule.gains import gains
from sglang_dspark.schedule.guard import Guard, GuardConfig, Mode
from sglang_dspark.schedule.relay import Relay


@dataclass(frozen=True)
class PlannerConfig:
    """lag: steps between a confidence and the first plan that may use it (at least 1).

    max_age: older confidences than this many steps give way to the prior. has_head: False for
    drafters without a confidence head, scheduled by past acceptance. early_stop: K by Algorithm 1
    over the present step, once its drafts are there, instead of by search before.
    look_deep: after this many steps of shallow drafts one is drafted to the end, for confidences
    of the positions that were left out; otherwise nothing could show that depth pays again.
    deep_share: drafts go to the end anyway where that adds no more than this part of a step.
    """

    lag: int = 2
    max_age: int = 16
    has_head: bool = True
    early_stop: bool = False
    look_deep: int = 16
    deep_share: float = 0.005
    guard: GuardConfig | None = None
    estimator: EstimatorConfig | None = None
    early_exit: ExitConfig | None = None

    def __post_init__(self) -> None:
        if self.lag < 1:
            raise ValueError("a plan must not see the step it plans: lag is at least 1")
        if self.look_deep < 1 or self.deep_share < 0:
            raise ValueError(f"look_deep must be at least 1 and deep_share at least 0: {self}")


@dataclass(frozen=True)
class Plan:
    """What was decided for step `step` before drafting.

    budget: K (with early stop only what is expected), depth and predictions. limits: [R] int64,
    most drafts of each request, depth included. floors: [R] int64 <= limits, or None, drafts
    admitted first. settled: whether the step may judge the guard. known: requests whose confidence
    was known, of `requests`. gain: corrected tokens/s of speculating over plain. weights: [R]
    float32, what a token of each request counts for in all of this, or None: all count alike.
    """

    step: int
    requests: int
    context: int
    budget: Budget
    limits: Counts
    floors: Counts | None
    mode: Mode
    settled: bool
    known: int
    gain: float
    weights: Gains | None = None

    @property
    def speculates(self) -> bool:
        """Whether the step drafts."""
        return self.budget.speculates


@dataclass(frozen=True)
class _Choice:
    """What a search chooses from."""

    gains: Gains
    costs: Costs
    limits: Counts
    floors: Counts | None
    base: float | None


class StepPlanner:
    """The scheduler of one engine (or of the rank that decides for all)."""

    def __init__(
        self, gamma: int, pool_rows: int, costs: CostModel, config: PlannerConfig | None = None
    ) -> None:
        if costs.table.gamma != gamma:
            raise ValueError(
                f"step times are for gamma {costs.table.gamma}, the drafter has {gamma}"
            )
        self.config = config or PlannerConfig()
        self.gamma = gamma
        self.costs = costs
        self.relay = Relay(pool_rows, gamma, lag=self.config.lag, max_age=self.config.max_age)
        self.estimator = AcceptanceEstimator(pool_rows, gamma, self.config.estimator)
        self.guard = Guard(self.config.guard)
        self.early_exit = EarlyExit(pool_rows, gamma, self.config.early_exit)
        self._workspace = Workspace(costs.max_requests, gamma)
        self._gains = np.empty((costs.max_requests, gamma), np.float32)
        self.delivered = Delivered()
        self._shallow = 0  # steps since a draft went to the end

    def plan(
        self,
        step: int,
        rows: Counts,
        tenants: Counts,
        context: int,
        *,
        weights: Gains | None = None,
        limits: Counts | None = None,
        floors: Counts | None = None,
        relay_arrived: bool = True,
    ) -> Plan:
        """Decide step `step` for R >= 1 requests in pool rows `rows`.

        rows, tenants: [R] int64. context: tokens of context of all requests together.
        weights: [R] float32 (`gains.speed_weights`). limits, floors: [R] int64, most and least
        drafts of each. relay_arrived: False takes the prior for everyone (all ranks alike).
        """
        requests = len(rows)
        # What was last seen before a phase without drafts is one sample, not the load's mean.
        seeing = relay_arrived and self.guard.state(requests).mode.speculates
        confidence, known = self._expected(step, rows, tenants, seeing)
        buffer = gains(confidence, weights, self._gains[:requests])
        costs = self.costs.costs(requests, context)
        most = self._limits(step, rows, tenants, limits, floors)
        base = _base(weights)
        choice = _Choice(buffer, costs, most, floors, base)
        best = self._search(choice)
        without = plain(requests, costs, base=base)
        verdict = self.guard.decide(
            requests,
            best.theta * self.delivered.share(True),
            without.theta * self.delivered.share(False),
        )
        if verdict.mode is Mode.PROBE_SPECULATE and best.drafts == 0:
            # A probe that verifies nothing would learn nothing of acceptance.
            floors = np.minimum(most, 1)
            best = self._search(replace(choice, floors=floors))
        budget = self._deepened(best, costs) if verdict.speculate else without
        return Plan(
            step,
            requests,
            context,
            budget,
            np.minimum(most, budget.depth),
            floors if budget.speculates else None,
            verdict.mode,
            verdict.settled,
            known,
            verdict.gain,
            weights,
        )

    def admit(self, plan: Plan, confidence: Gains | None) -> Counts:
        """Verify lengths l_r, [R] int64, of a planned step whose drafts are there.

        confidence: [R, gamma] float32 of this step, calibrated; entries behind the planned depth
        are not read. None if the step did not draft. Headless: what `expected` gave before.
        """
        if confidence is None or not plan.speculates:
            return np.zeros(plan.requests, np.int64)
        buffer = self._gains[: plan.requests]
        buffer[:] = confidence
        buffer[:, plan.budget.depth :] = 0.0
        gains(buffer, plan.weights, buffer)
        drafts = plan.budget.drafts
        if self.config.early_stop:
            costs = self.costs.costs(plan.requests, plan.context)
            drafts = early_stop(
                buffer,
                costs,
                self._workspace,
                limits=plan.limits,
                floors=plan.floors,
                base=_base(plan.weights),
                depth=plan.budget.depth,
            ).drafts
        return admit(buffer, drafts, self._workspace, limits=plan.limits, floors=plan.floors)

    def publish(self, plan: Plan, rows: Counts, tenants: Counts, confidence: Gains) -> None:
        """Hand a step's calibrated confidences to later plans: [R], [R], [R, gamma] float32.

        Behind the planned depth nothing was drafted; there the prior stands in.
        """
        if plan.budget.depth < self.gamma:
            confidence = confidence.copy()
            confidence[:, plan.budget.depth :] = self.estimator.prior()[plan.budget.depth :]
        self.relay.publish(plan.step, rows, tenants, confidence)

    def expected(self, rows: Counts, tenants: Counts) -> Gains:
        """Conditional acceptance from past outcomes, [R, gamma]: confidence without a head."""
        return self.estimator.confidence(rows, tenants)

    def finished(
        self,
        plan: Plan,
        rows: Counts,
        tenants: Counts,
        accepted: Counts,
        verified: Counts,
        confidence: Gains | None,
        seconds: float | None,
    ) -> None:
        """Learn from a step: [R] int64 drafts accepted and verified; seconds without prefill.

        confidence: [R, gamma] that `admit` was given. seconds None: the step also prefilled or
        was not timed; only outcomes are learned.
        """
        if plan.speculates and confidence is not None:
            first = confidence[:, 0]
            self.estimator.observe(rows, tenants, accepted, verified)
            self.early_exit.observe(plan.step, rows, tenants, accepted, verified, first)
        if seconds is None:
            return
        tokens = plan.requests + int(verified.sum())
        did = Step(plan.requests, tokens, plan.context, plan.budget.depth)
        usual = self.costs.observe(did, seconds)
        if usual and plan.settled:
            self.guard.observe(
                plan.requests,
                speculated=plan.speculates,
                tokens=_worth(plan, accepted),
                seconds=seconds,
                theta=plan.budget.theta,
            )

    def _limits(
        self,
        step: int,
        rows: Counts,
        tenants: Counts,
        limits: Counts | None,
        floors: Counts | None,
    ) -> Counts:
        """The caller's limits and those of early exit; floors come before both."""
        most = self.early_exit.limits(step, rows, tenants)
        if limits is not None:
            most = np.minimum(most, limits)
        return most if floors is None else np.maximum(most, floors)

    def _search(self, choice: _Choice) -> Budget:
        return search(
            choice.gains,
            choice.costs,
            self._workspace,
            limits=choice.limits,
            floors=choice.floors,
            base=choice.base,
            must_draft=True,
        )

    def _deepened(self, budget: Budget, costs: Costs) -> Budget:
        """The budget with the draft taken to the end, now and then or where cheap; K stays."""
        extra = float(costs.draft[self.gamma] - costs.draft[budget.depth])
        self._shallow += 1
        if (
            extra > self.config.deep_share * budget.seconds
            and self._shallow < self.config.look_deep
        ):
            return budget
        self._shallow = 0
        seconds = budget.seconds + extra
        return Budget(budget.drafts, self.gamma, budget.theta * budget.seconds / seconds, seconds)

    def _expected(
        self, step: int, rows: Counts, tenants: Counts, relay_arrived: bool
    ) -> tuple[Gains, int]:
        if not self.config.has_head:
            return self.expected(rows, tenants), len(rows)
        prior = self.estimator.prior()
        if not relay_arrived:
            return self.relay.unknown(len(rows), prior)[0], 0
        resolved = self.relay.resolve(step, rows, tenants, prior)
        return resolved.confidence, int(resolved.fresh.sum())


def _base(weights: Gains | None) -> float | None:
    """What the tokens that come without drafts count for together; None: R."""
    return None if weights is None else float(weights.sum(dtype=np.float64))


def _worth(plan: Plan, accepted: Counts) -> float:
    """What a step emitted, in the tokens that its plan promised: weighted like them."""
    if plan.weights is None:
        return float(plan.requests + accepted.sum())
    return float((plan.weights * (1 + accepted)).sum(dtype=np.float64))
