"""Measure the regret of scheduling rules against the oracle, over random machines and traces.

A rule's regret on a trace is the share of tokens it missed, at each load in the time it spent there
(`oracle.Oracle.regret`). The regret against the best rate of the whole run, which trades loads
against each other, is reported as well.

`dspark` runs the policy of servers (`guard.SERVING_GUARD`). `marginless` is the same with min_gain
0: the difference is the price of the margin that a server keeps for costs that no profile shows.
`informed` is `dspark` with exact costs and a guard that measurements cannot stop. Its regret is
mostly the margin's price, and the price of planning on survivals of two steps ago, which
losslessness under the overlap loop requires.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.cost_table import CostTable
from sglang_dspark.schedule.guard import SERVING_GUARD, GuardConfig
from sglang_dspark.schedule.plan import PlannerConfig
from sglang_dspark.schedule.simulation.oracle import oracle_of
from sglang_dspark.schedule.simulation.scenarios import random_machine, random_trace
from sglang_dspark.schedule.simulation.simulate import (
    Rule,
    algorithm1_rule,
    our_rule,
    plain_rule,
    score,
    static_rule,
    upstream_rule,
)

RULES = ("dspark", "marginless", "informed", "upstream", "algorithm1", "static", "plain")
LOADS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class RegretPlan:
    """worlds: number of machines, each with a trace of `steps` steps; noise of the profile."""

    worlds: int = 200
    steps: int = 400
    gamma: int = 7
    noise: float = 0.02
    seed: int = 0


class Regret(NamedTuple):
    """Regret of a rule on one world, in 0..1: against the oracle of each load, and of the run."""

    by_load: float
    whole_run: float


def regrets_of(plan: RegretPlan, world: int) -> dict[str, Regret]:
    """Return the regret of each rule on one random world; deterministic."""
    rng = np.random.default_rng((plan.seed, world))
    most = LOADS[world % len(LOADS)]
    machine = random_machine(rng, most, plan.gamma)
    trace = random_trace(rng, most, plan.gamma, plan.steps)
    table = machine.profile(rng, plan.noise)

    def ours(table: CostTable, guard: GuardConfig, noise: float = 0.03) -> Rule:
        outcomes = np.random.default_rng((plan.seed, world, 1))
        config = PlannerConfig(guard=guard)
        return our_rule(
            machine, trace, CostModel(table, most), outcomes, noise=noise, config=config
        )

    rules = {
        "dspark": ours(table, SERVING_GUARD),
        "marginless": ours(table, replace(SERVING_GUARD, min_gain=0.0)),
        "informed": ours(machine.profile(rng, 0.0), replace(SERVING_GUARD, doubt=1e6), 0.0),
        "upstream": upstream_rule(machine, trace, plan.gamma, np.asarray(table.seconds)),
        "algorithm1": algorithm1_rule(machine, trace, plan.gamma),
        "static": static_rule(trace, plan.gamma),
        "plain": plain_rule(trace),
    }
    oracle = oracle_of(machine, trace, plan.gamma)
    runs = {name: score(machine, trace, rule) for name, rule in rules.items()}
    return {
        name: Regret(oracle.regret(run), oracle.whole_run_regret(run)) for name, run in runs.items()
    }


def measure(plan: RegretPlan, tell: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Measure `{rule: {median, worst, mean, by_world, whole_run: {same}}}` over all worlds.

    The result holds the plan too. by_world: [worlds] regrets in the order of their numbers. tell:
    called with the number of worlds done.
    """
    found: dict[str, list[Regret]] = {name: [] for name in RULES}
    for world in range(plan.worlds):
        for name, regret in regrets_of(plan, world).items():
            found[name].append(regret)
        if tell is not None:
            tell(world + 1)
    summary: dict[str, Any] = {}
    for name, regrets in found.items():
        summary[name] = _summary([regret.by_load for regret in regrets])
        summary[name]["whole_run"] = _summary([regret.whole_run for regret in regrets])
    summary["worlds"], summary["steps"] = plan.worlds, plan.steps
    summary["gamma"], summary["loads"] = plan.gamma, list(LOADS)
    return summary


def _summary(values: list[float]) -> dict[str, Any]:
    return {
        "median": float(np.median(values)),
        "worst": float(np.max(values)),
        "mean": float(np.mean(values)),
        "by_world": [round(value, 5) for value in values],
    }
