"""The planner as a server drives it, and the simulator that measures its regret."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.cost_table import CostTable, ProfileKey
from sglang_dspark.schedule.early_stop import EarlyStopPlanner
from sglang_dspark.schedule.guard import SERVING_GUARD, GuardConfig, Mode
from sglang_dspark.schedule.guarded import GuardedPlanner, SearchPlanner
from sglang_dspark.schedule.plan import PlannerConfig
from sglang_dspark.schedule.planner_protocol import Planner
from sglang_dspark.schedule.simulation.oracle import oracle_of
from sglang_dspark.schedule.simulation.regret import RULES, RegretPlan, measure, regrets_of
from sglang_dspark.schedule.simulation.scenarios import (
    Machine,
    random_machine,
    random_trace,
    sample_accepted,
)
from sglang_dspark.schedule.simulation.simulate import our_rule, score
from sglang_dspark.schedule.static_threshold import ThresholdPlanner

GAMMA = 4


def planner_of(
    slope: float,
    draft: float | list[float],
    config: PlannerConfig | None = None,
    requests: int = 4,
    rule: type[GuardedPlanner] = SearchPlanner,
) -> GuardedPlanner:
    """On a machine where a pass over B tokens takes 1 + slope B and a draft takes `draft`, at every
    depth or by depth."""
    tokens = 1.0 + slope * np.arange(requests * (GAMMA + 1) + 1)
    depth = np.concatenate([[0.0], np.broadcast_to(draft, GAMMA)])
    machine = Machine(tokens, depth, (1, requests * (GAMMA + 1)), padded=False)
    table = machine.profile(np.random.default_rng(0), 0.0)
    return rule(GAMMA, 8, CostModel(table, requests), config)


def drive(planner: GuardedPlanner, steps: int, chance: float, *, start: int = 0) -> list[int]:
    """K of each step when every draft is accepted with `chance`, and said to be."""
    rng = np.random.default_rng(start)
    rows, generations = np.arange(4), np.arange(4) + 1
    admitted = []
    for step in range(start, start + steps):
        plan = planner.plan(step, rows, generations, context=0)
        confidence = np.full((4, GAMMA), chance, np.float32) if plan.speculates else None
        lengths = planner.admit(plan, confidence)
        assert lengths.sum() <= plan.budget.drafts
        if confidence is not None:
            planner.publish(plan, rows, generations, confidence)
        accepted = sample_accepted(rng, np.full((4, GAMMA), chance, np.float32), lengths)
        seconds = float(planner.costs.costs(4, 0).tokens[4 + lengths.sum()])
        seconds += float(planner.costs.costs(4, 0).draft[plan.budget.depth])
        planner.finished(plan, rows, generations, accepted, lengths, confidence, seconds)
        admitted.append(int(lengths.sum()))
    return admitted


def test_free_tokens_are_all_verified_costly_ones_are_not() -> None:
    assert drive(planner_of(slope=0.0, draft=0.0), 20, 0.8)[-1] == 4 * GAMMA
    some = drive(planner_of(slope=0.15, draft=0.05), 20, 0.8)[-1]
    assert 0 < some < 4 * GAMMA


def test_a_draft_that_does_not_pay_is_skipped_and_tried_again() -> None:
    planner = planner_of(slope=0.3, draft=0.5)
    admitted = drive(planner, 400, 0.2)
    assert admitted[100:].count(0) > 270
    assert any(admitted[100:])  # probes
    assert drive(planner_of(slope=0.01, draft=0.05), 50, 0.9)[-1] > 0


def test_plans_use_no_step_younger_than_the_lag() -> None:
    """No confidence of the last two steps changes the plan."""
    rows, generations = np.arange(4), np.arange(4) + 1
    plans = []
    for recent in (0.05, 0.95):
        planner = planner_of(slope=0.1, draft=0.05)
        for step in range(6):
            plan = planner.plan(step, rows, generations, context=0)
            said = np.full((4, GAMMA), 0.8 if step < 5 else recent, np.float32)
            planner.publish(plan, rows, generations, said)
        plans.append(planner.plan(6, rows, generations, context=0))
    assert plans[0].budget == plans[1].budget
    assert plans[0].known == 4


def test_missing_relay_data_is_the_prior_for_everyone() -> None:
    rows, generations = np.arange(4), np.arange(4) + 1
    planner = planner_of(slope=0.1, draft=0.05)
    drive(planner, 10, 0.95)
    late = planner.plan(10, rows, generations, context=0, relay_arrived=False)
    fresh = planner.plan(11, rows, generations + 50, context=0)
    assert late.known == fresh.known == 0
    assert late.budget.drafts == fresh.budget.drafts


def test_a_phase_without_drafts_is_predicted_from_the_prior() -> None:
    """The last confidences before it are no news, however high they were."""
    planner = planner_of(slope=0.3, draft=0.5)
    drive(planner, 20, 0.2)
    rows, generations = np.arange(4), np.arange(4) + 1
    paused = planner.plan(20, rows, generations, context=0)
    assert paused.mode is Mode.PLAIN
    planner.publish(paused, rows, generations, np.full((4, GAMMA), 0.99, np.float32))
    after = planner.plan(22, rows, generations, context=0)
    assert planner.experience.relay.resolve(
        22, rows, generations, np.zeros(GAMMA, np.float32)
    ).fresh.all()
    assert after.known == 0
    assert after.gain == pytest.approx(paused.gain)


def test_limits_floors_and_depth_reach_the_admission() -> None:
    rows, generations = np.arange(4), np.arange(4) + 1
    planner = planner_of(slope=0.0, draft=0.0)
    limits, floors = np.array([0, 1, 4, 4]), np.array([0, 1, 0, 2])
    plan = planner.plan(0, rows, generations, context=0, limits=limits, floors=floors)
    lengths = planner.admit(plan, np.zeros((4, GAMMA), np.float32))
    assert (lengths <= limits).all()
    assert (lengths >= floors).all()


def test_a_request_that_counts_for_more_gets_more() -> None:
    """Rows 0 .. 3 look alike; the weight goes into the plan, the admission and what is learned."""
    rows, generations = np.arange(4), np.arange(4) + 1
    weights = np.array([1, 1, 1, 3], np.float32)
    config = PlannerConfig(guard=replace(SERVING_GUARD, plain_every=1024))
    planner = planner_of(slope=0.15, draft=0.05, config=config)
    drive(planner, 20, 0.7)
    confidence = np.full((4, GAMMA), 0.7, np.float32)
    alike = planner.plan(20, rows, generations, context=0)
    even = planner.admit(alike, confidence)
    weighed = planner.plan(21, rows, generations, context=0, weights=weights)
    uneven = planner.admit(weighed, confidence)
    assert np.ptp(even) <= 1
    assert uneven[3] > max(even[3], *uneven[:3])
    assert weighed.budget.theta > alike.budget.theta  # in weighted tokens

    kept = weighed.budget.theta * weighed.budget.seconds  # what was promised is what came out
    accepted = np.array([0, 0, 0, round((kept - weights.sum()) / 3)])
    before = planner.guard.state(4).speculating
    seconds = float((weights * (1 + accepted)).sum()) / weighed.budget.theta
    planner.finished(weighed, rows, generations, accepted, uneven, confidence, seconds)
    after = planner.guard.state(4).speculating
    assert after.delivered - before.delivered * (1 - 1 / 128) == pytest.approx(1.0, abs=0.02)


def test_weights_count_for_the_tokens_that_need_no_draft() -> None:
    """Theta of a plan has the weights' sum for its base, whichever way the weights are spread."""
    rows, generations = np.arange(4), np.arange(4) + 1
    planner = planner_of(slope=0.15, draft=0.05)
    none = np.zeros(4, np.int64)
    for weights in ([1, 1, 1, 1], [3, 3, 3, 3], [0.5, 1, 1, 5]):
        array = np.array(weights, np.float32)
        plan = planner.plan(0, rows, generations, context=0, weights=array, limits=none)
        assert plan.budget.drafts == 0
        assert plan.budget.theta * plan.budget.seconds == pytest.approx(sum(weights))
    free = planner_of(slope=0.0, draft=0.0)
    one, three = (
        free.plan(0, rows, generations, context=0, weights=weights)
        for weights in (np.full(4, 1, np.float32), np.full(4, 3, np.float32))
    )
    assert one.budget.drafts == three.budget.drafts == 4 * GAMMA
    assert three.budget.theta == pytest.approx(3 * one.budget.theta)


def test_the_first_draft_to_the_end_comes_after_look_deep_steps() -> None:
    guard = replace(SERVING_GUARD, plain_every=1024)
    config = PlannerConfig(look_deep=5, deep_share=0.0, guard=guard)
    planner = planner_of(slope=0.0, draft=[0.0, 0.4, 0.8, 1.2], config=config)
    rows, generations = np.arange(4), np.arange(4) + 1
    unlikely = np.full((4, GAMMA), 0.1, np.float32)  # deep drafts cost more than they bring
    depths = []
    for step in range(12):
        plan = planner.plan(step, rows, generations, context=0)
        planner.publish(plan, rows, generations, unlikely)
        depths.append(plan.budget.depth)
    assert depths == [1, 1, 1, 1, GAMMA, 1, 1, 1, 1, GAMMA, 1, 1]


def test_early_stop_mode_takes_k_from_the_present_step() -> None:
    rows, generations = np.arange(4), np.arange(4) + 1
    planner = planner_of(slope=0.1, draft=0.02, rule=EarlyStopPlanner)
    plan = planner.plan(0, rows, generations, context=0)
    assert planner.admit(plan, np.full((4, GAMMA), 0.99, np.float32)).sum() > 8
    assert planner.admit(plan, np.full((4, GAMMA), 0.01, np.float32)).sum() == 0


def test_early_stop_counts_limits_floors_weights_and_the_depth_drafted() -> None:
    """All of the plan: of sure drafts as many as the limits leave, of worthless ones the floors."""
    rows, generations = np.arange(4), np.arange(4) + 1
    config = PlannerConfig(guard=replace(SERVING_GUARD, untried_loss=0.99))
    planner = planner_of(slope=0.1, draft=0.02, config=config, rule=EarlyStopPlanner)
    limits, floors = np.array([1, 2, 4, 4]), np.array([1, 0, 0, 2])
    plan = planner.plan(0, rows, generations, context=0, limits=limits, floors=floors)
    sure = planner.admit(plan, np.full((4, GAMMA), 0.99, np.float32))
    assert (sure == np.minimum(limits, plan.budget.depth)).all()
    assert (planner.admit(plan, np.zeros((4, GAMMA), np.float32)) == floors).all()

    kept_out = planner.plan(1, rows, generations, context=0, limits=np.array([0, 4, 4, 4]))
    said = np.full((4, GAMMA), 0.2, np.float32)
    said[0] = 0.99  # what pays but may not be verified makes nothing else pay
    assert planner.admit(kept_out, said).sum() == 0

    heavy = planner.plan(
        2, rows, generations, context=0, weights=np.array([1, 1, 1, 4], np.float32)
    )
    # A draft adds 0.1 s to 1.42, so it has to add half a token to the 7 that count without it.
    doubtful = planner.admit(heavy, np.full((4, GAMMA), 0.15, np.float32))
    assert doubtful.tolist() == [0, 0, 0, 1]
    assert planner.admit(heavy, np.full((4, GAMMA), 0.11, np.float32)).sum() == 0

    # 4.35 tokens in 3 s are fewer a second than 4 in 2.6 s; after a deep draft they would be more.
    planner = planner_of(
        slope=0.4, draft=[0.0, 4.0, 8.0, 12.0], config=config, rule=EarlyStopPlanner
    )
    shallow = planner.plan(0, rows, generations, context=0, limits=np.ones(4, np.int64))
    assert shallow.budget.depth == 1
    assert planner.admit(shallow, np.full((4, GAMMA), 0.35, np.float32)).sum() == 0


def test_early_stop_does_not_stop_at_a_slow_number_of_rows() -> None:
    """Times of 1 to 6 rows on a Zen 4: four are slower than six."""
    key = ProfileKey("m", "d", "", "", "", "", "", gamma=5)
    rows, drafts = (106.0, 98.0, 95.0, 111.0, 99.0, 93.0), (0.0, 30.0, 30.0, 30.0, 30.0, 30.0)
    table = CostTable(key, (1, 2, 3, 4, 5, 6), rows, False, 0.0, 0.0, (1,), (drafts,))
    said = np.full((1, 5), 0.6, np.float32)
    for rule in (EarlyStopPlanner, SearchPlanner):
        planner = rule(5, 1, CostModel(table, 1))
        plan = planner.plan(0, np.zeros(1, np.int64), np.ones(1, np.int64), context=0)
        assert planner.admit(plan, said).tolist() == [5], rule


def test_each_planner_says_what_it_schedules_by() -> None:
    costs = planner_of(0.1, 0.1).costs
    headless = PlannerConfig(signal="draft probability")
    rules: list[tuple[Planner, str]] = [
        (SearchPlanner(GAMMA, 8, costs), "confidence, algorithm search"),
        (EarlyStopPlanner(GAMMA, 8, costs, headless), "draft probability, algorithm early-stop"),
        (ThresholdPlanner(0.5, GAMMA, 8, costs), "a threshold of 0.5 on confidence alone"),
    ]
    for planner, said in rules:
        assert planner.describe() == said
        assert planner.gamma == GAMMA
        assert planner.fallbacks == 0


def test_a_fall_back_is_counted() -> None:
    planner = planner_of(slope=0.3, draft=0.5)
    drive(planner, 100, 0.2)
    assert planner.fallbacks == planner.guard.fallbacks > 0


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="lag"):
        PlannerConfig(lag=0)
    with pytest.raises(ValueError, match="gamma 4"):
        SearchPlanner(5, 8, planner_of(0.1, 0.1).costs)


def test_the_regret_measured_is_that_of_the_policy_that_serves() -> None:
    """World 121 as the rule `dspark` and by hand; with another guard it comes out otherwise."""
    plan = RegretPlan(steps=150)

    def by_hand(guard: GuardConfig) -> float:
        rng = np.random.default_rng((plan.seed, 121))
        machine, trace = random_machine(rng, 16, 7), random_trace(rng, 16, 7, plan.steps)
        model = CostModel(machine.profile(rng, plan.noise), 16)
        outcomes = np.random.default_rng((plan.seed, 121, 1))
        rule = our_rule(machine, trace, model, outcomes, config=PlannerConfig(guard=guard))
        return oracle_of(machine, trace, 7).regret(score(machine, trace, rule))

    measured = regrets_of(plan, 121)["dspark"].by_load
    assert measured == by_hand(SERVING_GUARD)
    assert measured != by_hand(replace(SERVING_GUARD, plain_every=1024))


def test_regret_is_small_and_the_oracle_is_above() -> None:
    """A sample of the worlds that `dspark bench regret` measures."""
    summary = measure(RegretPlan(worlds=15, steps=150))
    assert summary["dspark"]["median"] <= 0.01
    assert summary["dspark"]["worst"] <= 0.05
    assert summary["dspark"]["mean"] < min(
        summary[rule]["mean"] for rule in ("upstream", "algorithm1", "static", "plain")
    )
    for rule in RULES:
        assert summary[rule]["median"] >= 0
        assert summary[rule]["whole_run"]["worst"] >= summary[rule]["whole_run"]["median"] >= 0


def test_the_model_error_stays_small_on_a_drifting_machine() -> None:
    rng = np.random.default_rng(5)
    machine = random_machine(rng, 32, 7)
    drifting = Machine(machine.tokens, machine.draft, machine.knots, machine.padded, drift=1.5)
    trace = random_trace(rng, 32, 7, 300)
    model = CostModel(drifting.profile(rng, 0.05), 32)
    run = score(drifting, trace, our_rule(drifting, trace, model, rng))
    assert model.median_error() <= 0.1
    assert oracle_of(drifting, trace, 7).regret(run) < 0.05
