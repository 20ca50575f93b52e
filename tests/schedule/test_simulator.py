"""The simulator: upstream's choices are upstream's, and every kind of load is there."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.guard import SERVING_GUARD, GuardConfig
from sglang_dspark.schedule.plan import PlannerConfig
from sglang_dspark.schedule.simulation.oracle import largest_rate, options_of, oracle_of
from sglang_dspark.schedule.simulation.scenarios import (
    Machine,
    Trace,
    random_machine,
    random_trace,
)
from sglang_dspark.schedule.simulation.simulate import (
    algorithm1_rule,
    our_rule,
    plain_rule,
    score,
    static_rule,
    upstream_rule,
)
from sglang_dspark.serving.upstream_planner import UpstreamPlanner
from tests.schedule.kinds import CURVES, LOADS, machine_of, trace_of

GAMMA = 7


def test_upstream_rule_chooses_as_upstream_does() -> None:
    """K and every length equal those of upstream's own functions on the same table and trace."""
    assert len(set().union(*(upstream_budgets(seed) for seed in range(4)))) > 6  # it chose


def upstream_budgets(seed: int) -> set[int]:
    """Every K that both chose on one random trace."""
    rng = np.random.default_rng(seed)
    machine, trace = random_machine(rng, 16, GAMMA), random_trace(rng, 16, GAMMA, 60)
    seconds = machine.tokens[list(machine.timed)]
    rule = upstream_rule(machine, trace, GAMMA, seconds)
    theirs = UpstreamPlanner(GAMMA, machine.tokens, probes=machine.timed)
    certain = np.ones(GAMMA, np.float32)
    last: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = {}
    budgets: set[int] = set()
    for t in range(trace.steps):
        pairs = list(zip(trace.rows[t].tolist(), trace.generations[t].tolist(), strict=True))
        lagged = np.array(
            [
                next((c for at, c in reversed(last.get(p, [])) if at <= t - 2), certain)
                for p in pairs
            ]
        )
        budget = theirs.budget(torch.from_numpy(lagged))
        with_anchor = theirs.topk(torch.from_numpy(trace.confidence[t]), budget)
        lengths, depth = rule(t)
        assert depth == GAMMA
        np.testing.assert_array_equal(lengths, with_anchor.numpy() - 1)
        budgets.add(budget)
        for pair, confidence in zip(pairs, trace.confidence[t], strict=True):
            last.setdefault(pair, []).append((t, confidence))
    return budgets


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("load", LOADS)
def test_every_kind_of_curve_and_load(curve: str, load: str) -> None:
    """Ours is near the oracle on each, no rule beats the oracle, and shape and load are as named.

    Near it where nothing is kept for what a profile does not see. As it serves, it refuses gains
    within its margin, which on steep curves is most of what there is; there it is no tax.
    """
    rng = np.random.default_rng(7)
    machine = machine_of(curve, rng, 32, GAMMA)
    trace = trace_of(load, rng, 32, GAMMA, 300)
    oracle = oracle_of(machine, trace, GAMMA)
    table = machine.profile(rng, 0.02)

    def regret(guard: GuardConfig) -> float:
        model, config = CostModel(table, 32), PlannerConfig(guard=guard)
        rule = our_rule(machine, trace, model, np.random.default_rng(7), config=config)
        return oracle.regret(score(machine, trace, rule))

    assert 0 <= regret(replace(SERVING_GUARD, min_gain=0.0, probe_start_cost=0.0)) < 0.05
    plain = oracle.regret(score(machine, trace, plain_rule(trace)))
    assert 0 <= regret(SERVING_GUARD) < max(0.05, plain)
    for rule in (plain_rule(trace), static_rule(trace, GAMMA)):
        assert oracle.regret(score(machine, trace, rule)) >= 0
    assert oracle.regret(score(machine, trace, algorithm1_rule(machine, trace, GAMMA))) >= 0
    _is_as_named(curve, machine.tokens, machine.drift, machine.padded)
    _load_is_as_named(load, trace)


def _is_as_named(curve: str, tokens: np.ndarray, drift: float, padded: bool) -> None:
    jumps = np.diff(tokens[1:])
    assert (drift != 1.0) == (curve == "drifting")
    assert padded == (curve in ("jagged", "drifting"))
    if curve == "jagged":
        assert (jumps == 0).mean() > 0.8
    if curve == "steep":
        assert tokens[-1] > 5 * tokens[1]
    if curve == "flat":
        assert tokens[-1] < 1.5 * tokens[1]


def _load_is_as_named(load: str, trace: Trace) -> None:
    sizes = np.array([len(rows) for rows in trace.rows])
    means = np.array([confidence.mean() for confidence in trace.confidence])
    assert (sizes.max() >= 8 * sizes.min()) == (load == "bursts")
    half = trace.steps // 2
    fell = means[: half - 20].mean() - means[-100:].mean() > 0.15
    assert fell == (load == "shift")


def test_the_whole_run_oracle_may_serve_a_load_worse_than_plain() -> None:
    """Why regret is taken load by load.

    One request for 100 steps, where drafting gives 1.36 tokens/s instead of 1.0; then eight, where
    plain decoding gives 5.7 and drafting nothing. The best rate of all 200 steps together leaves
    the single request at 1.0: its steps last longer with drafts, and there are 100 of them.
    """
    trace = Trace(
        tuple(np.arange(1 if t < 100 else 8) for t in range(200)),
        tuple(np.arange(1 if t < 100 else 8) + 1 for t in range(200)),
        tuple(np.full((1 if t < 100 else 8, 1), 0.9, np.float32) for t in range(200)),
        8,
    )
    tokens = np.array([1.0, 1.0, 1.3, *[1.4] * 6, *[9.0] * 8])
    machine = Machine(tokens, np.array([0.0, 0.1]), (1, 2, 8, 16), padded=True)
    oracle = oracle_of(machine, trace, 1)
    light = options_of(machine, trace, 1)[:100]
    assert oracle.by_load[1] == pytest.approx(1.9 / 1.4)  # drafting: 1.36 tokens/s against 1.0
    rate = oracle.whole_run
    chosen = [int(np.argmax(o.tokens - rate * o.seconds)) for o in light]
    assert set(chosen) == {0}  # the whole-run oracle serves this load plainly
    assert largest_rate(light) > 1.3 * (1.0 / 1.0)


def test_thousands_of_devices_take_seconds() -> None:
    """1,000 steps of 128 requests on one device are decided and scored in 20 s of CPU time."""
    rng = np.random.default_rng(0)
    machine, trace = random_machine(rng, 128, GAMMA), random_trace(rng, 128, GAMMA, 1000)
    rule = our_rule(machine, trace, CostModel(machine.profile(rng, 0.02), 128), rng)
    short = random_trace(rng, 128, GAMMA, 5)
    score(machine, short, our_rule(machine, short, CostModel(machine.profile(rng, 0.02), 128), rng))
    start = time.process_time()
    score(machine, trace, rule)
    assert time.process_time() - start < 20.0
