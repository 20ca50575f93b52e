"""Plan by measured step times, and draft only if that is faster.

`GuardedPlanner` is the base of both rules for K; `SearchPlanner` is the default rule.

`plan` reads finished steps only, through a relay that lags. Its K is found by search over the last
known confidences; depth, limits, floors, weights and whether to draft are the plan's under either
rule. `admit` turns K into verify lengths by the survivals of the step itself.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Budget, Costs, Counts, Gains, Workspace, plain, search
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.early_exit import EarlyExit
from sglang_dspark.schedule.experience import Experience
from sglang_dspark.schedule.gains import gains
from sglang_dspark.schedule.guard import Guard, Mode, Verdict
from sglang_dspark.schedule.plan import Plan, PlannerConfig, base_of
from sglang_dspark.schedule.planner_protocol import Planner


@dataclass(frozen=True)
class _Choice:
    """Inputs of a search."""

    gains: Gains
    costs: Costs
    limits: Counts
    floors: Counts | None
    base: float | None


class GuardedPlanner(Planner):
    """A planner with a guard and early exit; subclasses add a rule for K."""

    def __init__(
        self, gamma: int, pool_rows: int, costs: CostModel, config: PlannerConfig | None = None
    ) -> None:
        self.config = config or PlannerConfig()
        self.experience = Experience(gamma, pool_rows, costs, self.config)
        self.guard = Guard(self.config.guard)
        self.early_exit = EarlyExit(pool_rows, gamma, self.config.early_exit)
        self._workspace = Workspace(costs.max_requests, gamma)
        self._gains = np.empty((costs.max_requests, gamma), np.float32)
        self._shallow = 0  # steps since the last full-depth draft

    @abstractmethod
    def drafts(self, plan: Plan, survivals: Gains) -> int:
        """Return K of a planned step; survivals: [R, gamma] of its drafts, weighted."""
        ...

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
        """Plan step `step` from finished steps only."""
        requests = len(rows)
        # Confidences from before a phase without drafts are one sample, not the load's mean.
        seeing = relay_arrived and self.guard.state(requests).mode.speculates
        confidence, known = self.experience.confidence(step, rows, generations, seeing)
        buffer = gains(confidence, weights, self._gains[:requests])
        costs = self.costs.costs(requests, context)
        most = self._limits(step, rows, generations, limits, floors)
        choice = _Choice(buffer, costs, most, floors, base_of(weights))
        best = self._search(choice)
        without = plain(requests, costs, base=choice.base)
        verdict = self._verdict(requests, best, without)
        if examine and not verdict.speculate:
            verdict = Verdict(True, False, Mode.PROBE_SPECULATE, verdict.gain)
        if examine or (verdict.mode is Mode.PROBE_SPECULATE and best.drafts == 0):
            # A probe without verified drafts would not measure acceptance.
            least = np.minimum(most, 1)
            floors = least if floors is None else np.maximum(floors, least)
            best = self._search(replace(choice, floors=floors))
        budget = self._deepened(best, costs) if verdict.speculate else without
        most, floors = np.minimum(most, budget.depth), floors if budget.speculates else None
        return Plan(
            step, requests, context, budget, most, floors,
            verdict.mode, verdict.settled, known, verdict.gain, weights,
        )  # fmt: skip

    def again(self, plan: Plan, step: int) -> Plan:
        """Return the newest plan for one more step, counted as one of the guard's mode."""
        self.guard.kept(plan.requests)
        return super().again(plan, step)

    def admit(self, plan: Plan, confidence: Gains | None) -> Counts:
        """Return verify lengths l_r, [R] int64: the K drafts of largest survival in this step."""
        if confidence is None or not plan.speculates:
            return np.zeros(plan.requests, np.int64)
        buffer = self._gains[: plan.requests]
        buffer[:] = confidence
        buffer[:, plan.budget.depth :] = 0.0
        gains(buffer, plan.weights, buffer)
        drafts = self.drafts(plan, buffer)
        return admit(buffer, drafts, self._workspace, limits=plan.limits, floors=plan.floors)

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
        """Learn from a step; the guard learns only if it is settled and no outlier."""
        if plan.speculates and confidence is not None:
            first = confidence[:, 0]
            self.experience.estimator.observe(accepted, verified)
            self.early_exit.observe(plan.step, rows, generations, accepted, verified, first)
        if seconds is None:
            return
        usual = self.experience.timed(plan, verified, seconds)
        if usual and plan.settled:
            self.guard.observe(
                plan.requests,
                speculated=plan.speculates,
                tokens=plan.worth(accepted),
                seconds=seconds,
                theta=plan.budget.theta,
            )

    def renew(self) -> None:
        """Reset the guard's measurements of whether drafting pays."""
        self.guard.renew()

    @property
    def fallbacks(self) -> int:
        """Return how often a load fell back to plain decoding."""
        return self.guard.fallbacks

    def _verdict(self, requests: int, best: Budget, without: Budget) -> Verdict:
        """Decide whether the step drafts, by the delivered tokens/s of both modes."""
        delivered = self.delivered
        return self.guard.decide(
            requests, best.theta * delivered.share(True), without.theta * delivered.share(False)
        )

    def _limits(
        self,
        step: int,
        rows: Counts,
        generations: Counts,
        limits: Counts | None,
        floors: Counts | None,
    ) -> Counts:
        """Combine the caller's limits with early exit's; floors override both."""
        most = self.early_exit.limits(step, rows, generations)
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
        """Extend the draft to full depth, every `look_deep` steps or if it is fast; keep K."""
        extra = float(costs.draft[self.gamma] - costs.draft[budget.depth])
        self._shallow += 1
        costly = extra > self.config.deep_share * budget.seconds
        if costly and self._shallow < self.config.look_deep:
            return budget
        self._shallow = 0
        seconds = budget.seconds + extra
        return Budget(budget.drafts, self.gamma, budget.theta * budget.seconds / seconds, seconds)


class SearchPlanner(GuardedPlanner):
    """A planner that chooses K before drafting, by the predicted tokens/s.

    K does not depend on the drafts, which makes the schedule lossless (docs/losslessness.md; paper,
    3.2.2).
    """

    def drafts(self, plan: Plan, survivals: Gains) -> int:
        """Return the plan's K; the drafts have no influence."""
        return plan.budget.drafts

    def describe(self) -> str:
        """Describe the signal and the algorithm, for the log's line at the start."""
        return f"{self.experience.signal}, algorithm search"
