"""Regret of scheduling rules against the oracle, over random machines and traces.

`informed` is `dspark` with exact costs and without the guard: what is left of its regret is the
price of planning on survivals of two steps ago, which being lossless under the overlap loop asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.guard import GuardConfig
from sglang_dspark.schedule.planner import PlannerConfig
from sglang_dspark.schedule.simulate import (
    algorithm1_rule,
    oracle_rate,
    our_rule,
    plain_rule,
    score,
    static_rule,
    upstream_rule,
)
from sglang_dspark.schedule.worlds import random_machine, random_trace

RULES = ("dspark", "informed", "upstream", "algorithm1", "static", "plain")
LOADS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class RegretPlan:
    """worlds: how many machines, each with a trace of `steps` steps; noise of the profile."""

    worlds: int = 200
    steps: int = 400
    gamma: int = 7
    noise: float = 0.02
    seed: int = 0


def regrets_of(plan: RegretPlan, world: int) -> dict[str, float]:
    """1 - rate / oracle's rate of each rule on one random world; deterministic."""
    rng = np.random.default_rng((plan.seed, world))
    most = LOADS[world % len(LOADS)]
    machine = random_machine(rng, most, plan.gamma)
    trace = random_trace(rng, most, plan.gamma, plan.steps)
    table = machine.profile(rng, plan.noise)
    model = CostModel(table, most)
    rules = {
        "dspark": our_rule(machine, trace, model, rng),
        "informed": our_rule(
            machine,
            trace,
            CostModel(machine.profile(rng, 0.0), most),
            np.random.default_rng((plan.seed, world, 1)),
            noise=0.0,
            config=PlannerConfig(guard=GuardConfig(doubt=1e6)),
        ),
        "upstream": upstream_rule(machine, trace, plan.gamma, np.asarray(table.seconds)),
        "algorithm1": algorithm1_rule(machine, trace, plan.gamma),
        "static": static_rule(trace, plan.gamma),
        "plain": plain_rule(trace),
    }
    best = oracle_rate(machine, trace, plan.gamma)
    return {name: 1 - score(machine, trace, rule).rate / best for name, rule in rules.items()}


def measure(plan: RegretPlan, tell: Callable[[int], None] | None = None) -> dict[str, Any]:
    """`{rule: {median, worst, mean}}` over all worlds, and the plan. tell: worlds done."""
    found: dict[str, list[float]] = {name: [] for name in RULES}
    for world in range(plan.worlds):
        for name, regret in regrets_of(plan, world).items():
            found[name].append(regret)
        if tell is not None:
            tell(world + 1)
    summary: dict[str, Any] = {
        name: {
            "median": float(np.median(values)),
            "worst": float(np.max(values)),
            "mean": float(np.mean(values)),
        }
        for name, values in found.items()
    }
    summary["worlds"], summary["steps"] = plan.worlds, plan.steps
    summary["gamma"], summary["loads"] = plan.gamma, list(LOADS)
    return summary
