"""Run scheduling rules against machines and traces, without a model.

Each rule has the inputs that it would have in serving. A step's expected tokens are those of the
calibrated confidences. A run is scored by its expected tokens over its true seconds. All rules see
the same trace, step by step.

The oracle, which is not a rule, is in `schedule/simulation/oracle.py`.

ours        `SearchPlanner` with a noisy profile, relay lag 2, online correction and the guard.
algorithm1  early stop on the present step, true costs.
upstream    described from its behaviour: lagged survivals; unknown requests count as certain; a
            pass of B tokens costs as much as the largest probe <= B; no draft cost.
static      verifies every draft. plain drafts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Costs, Counts, Seconds, Workspace, early_stop, search
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.gains import gains
from sglang_dspark.schedule.guarded import SearchPlanner
from sglang_dspark.schedule.plan import PlannerConfig
from sglang_dspark.schedule.relay import Relay
from sglang_dspark.schedule.simulation.scenarios import Machine, Trace, sample_accepted

Floats = NDArray[np.float64]
UPSTREAM_LEAST = 1e-6  # upstream admits no draft of a smaller survival


@dataclass(frozen=True)
class Run:
    """Result of a rule on a trace: by step, expected tokens, true seconds, K and depth."""

    tokens: Floats
    seconds: Floats
    drafts: Counts
    depth: Counts

    @property
    def rate(self) -> float:
        """Return the tokens per second over the whole run."""
        return float(self.tokens.sum() / self.seconds.sum())


# Maps a step's number to the verify lengths and the depth drafted.
Rule = Callable[[int], tuple[Counts, int]]


def score(machine: Machine, trace: Trace, rule: Rule) -> Run:
    """Run a rule over a trace."""
    tokens, seconds = np.zeros(trace.steps), np.zeros(trace.steps)
    drafts, depths = np.zeros(trace.steps, np.int64), np.zeros(trace.steps, np.int64)
    for t in range(trace.steps):
        lengths, depth = rule(t)
        tokens[t], seconds[t] = outcome(machine, trace, t, lengths, depth)
        drafts[t], depths[t] = lengths.sum(), depth
    return Run(tokens, seconds, drafts, depths)


def outcome(
    machine: Machine, trace: Trace, t: int, lengths: Counts, depth: int
) -> tuple[float, float]:
    """Return expected tokens and true seconds of step t with these verify lengths."""
    survivals = gains(trace.confidence[t])
    kept = np.arange(survivals.shape[1]) < lengths[:, None]
    requests = len(lengths)
    progress = t / trace.steps
    seconds = machine.seconds(requests + int(lengths.sum()), depth, progress)
    return requests + float(survivals[kept].sum(dtype=np.float64)), seconds


def plain_rule(trace: Trace) -> Rule:
    """Return the rule that drafts nothing."""
    return lambda t: (np.zeros(len(trace.rows[t]), np.int64), 0)


def static_rule(trace: Trace, gamma: int) -> Rule:
    """Return the rule that verifies all drafts."""
    return lambda t: (np.full(len(trace.rows[t]), gamma, np.int64), gamma)


def algorithm1_rule(machine: Machine, trace: Trace, gamma: int) -> Rule:
    """Return the rule of early stop on the current step's survivals, with true costs."""
    workspace = Workspace(trace.pool_rows, gamma)
    costs = Costs(machine.tokens, 0.0, machine.draft)

    def rule(t: int) -> tuple[Counts, int]:
        survivals = gains(trace.confidence[t])
        drafts = early_stop(survivals, costs, workspace).drafts
        return admit(survivals, drafts, workspace), gamma

    return rule


def upstream_rule(machine: Machine, trace: Trace, gamma: int, table_seconds: Seconds) -> Rule:
    """Return the rule of upstream's global search; table_seconds: [knots] of its profile."""
    batch = np.arange(len(machine.tokens))
    at = np.maximum(np.searchsorted(machine.timed, batch, side="right") - 1, 0)
    costs = Costs(table_seconds[at], 0.0, np.zeros(gamma + 1))
    workspace = Workspace(trace.pool_rows, gamma)
    relay = Relay(trace.pool_rows, gamma, lag=2, max_age=1 << 40)
    certain = np.ones(gamma, np.float32)

    def rule(t: int) -> tuple[Counts, int]:
        rows, generations = trace.rows[t], trace.generations[t]
        lagged = gains(relay.resolve(t, rows, generations, certain).confidence)
        most = (lagged >= UPSTREAM_LEAST).sum(1)
        drafts = search(lagged, costs, workspace, limits=most, must_draft=True).drafts
        relay.publish(t, rows, generations, trace.confidence[t])
        present = gains(trace.confidence[t])
        most = (present >= UPSTREAM_LEAST).sum(1)
        return admit(present, drafts, workspace, limits=most), gamma

    return rule


def our_rule(
    machine: Machine,
    trace: Trace,
    model: CostModel,
    rng: np.random.Generator,
    *,
    noise: float = 0.03,
    speed: Floats | None = None,
    config: PlannerConfig | None = None,
) -> Rule:
    """Return the rule of the whole planner, on sampled outcomes and noisy step times.

    noise: standard deviation of log step times. speed: [steps] factors on the measured times, of a
    machine that is shared with others. The score ignores them: they do not depend on the rule.
    """
    planner = SearchPlanner(model.table.gamma, trace.pool_rows, model, config)

    def rule(t: int) -> tuple[Counts, int]:
        rows, generations, confidence = trace.rows[t], trace.generations[t], trace.confidence[t]
        plan = planner.plan(t, rows, generations, context=0)
        lengths = planner.admit(plan, confidence if plan.speculates else None)
        if plan.speculates:
            planner.publish(plan, rows, generations, confidence)
        accepted = sample_accepted(rng, confidence, lengths)
        true = machine.seconds(len(rows) + int(lengths.sum()), plan.budget.depth, t / trace.steps)
        seconds = true * float(np.exp(noise * rng.standard_normal()))
        seconds *= 1.0 if speed is None else float(speed[t])
        planner.finished(plan, rows, generations, accepted, lengths, confidence, seconds)
        return lengths, plan.budget.depth

    return rule
