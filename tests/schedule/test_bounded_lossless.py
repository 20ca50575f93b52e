"""Floors and limits under both rules for K: exact joint distribution of two requests, in rationals.

The real planner plans and admits, over all floors and limits of two requests of two drafts, cost
curves, depths and weights. Algorithm 1 decides on the present step (lag 0), the search on the one
before. A schedule is a function from the drafts to verify lengths; of those many coincide, and each
is counted once.

What a stop must not do is decide in another order than the admission's: one that does not count the
floors, which are admitted first, has seen survivals behind drafts that it skips.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Counts, Gains, search
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.cost_table import CostTable, ProfileKey
from sglang_dspark.schedule.early_stop import EarlyStopPlanner
from sglang_dspark.schedule.gains import gains
from sglang_dspark.schedule.guard import SERVING_GUARD
from sglang_dspark.schedule.guarded import GuardedPlanner, SearchPlanner
from sglang_dspark.schedule.plan import Plan, PlannerConfig
from sglang_dspark.verify import accept_sampled
from tests.schedule.batches import GAMMA, batch_probs, drafted_pairs, plain_probs
from tests.schedule.test_lossless import HEADS, PAIR, pair

KEY = ProfileKey("target", "drafter", "float32", "cpu", "tp1", "exact", "1", GAMMA)
ROWS, GENERATIONS = np.arange(2), np.ones(2, np.int64)
ALWAYS = replace(SERVING_GUARD, untried_loss=0.99)  # drafts at any promise
EACH = [(floor, limit) for limit in range(GAMMA + 1) for floor in range(limit + 1)]
BOUNDS = list(itertools.product(EACH, repeat=2))  # of both requests
SLOPES = list(itertools.product((0.1, 0.5), repeat=3))  # seconds of the 3rd to the 5th token
DEPTHS = {"flat": (0.0, 0.2, 0.2), "by depth": (0.0, 0.05, 0.6)}  # seconds of drafting
WEIGHTS = {"alike": None, "unlike": np.array([1, 2], np.float32)}

Lengths = tuple[tuple[int, ...], ...]  # of each pair of drafts
Admission = Callable[[GuardedPlanner, Plan, Gains], Counts]


@dataclass(frozen=True)
class Case:
    """Values fixed before drafting; `bounds`: (floor, limit) of each request."""

    heads: str
    slopes: tuple[float, ...]
    depths: str
    weights: str
    bounds: tuple[tuple[int, int], ...]

    def planner(self, *, early_stop: bool) -> GuardedPlanner:
        """One that knows these costs exactly and has seen nothing."""
        seconds = 1.0 + np.cumsum([0.0, 0.0, *self.slopes, 0.1])
        table = CostTable(
            key=KEY,
            knots=tuple(range(1, 7)),
            seconds=tuple(seconds.tolist()),
            padded=False,
            per_request=0.0,
            per_context=0.0,
            draft_requests=(1,),
            draft_seconds=(DEPTHS[self.depths],),
        )
        config = PlannerConfig(lag=1, guard=ALWAYS)
        rule = EarlyStopPlanner if early_stop else SearchPlanner
        return rule(GAMMA, 2, CostModel(table, 2), config)

    def plan(self, planner: GuardedPlanner, step: int) -> Plan:
        floors, limits = np.array(self.bounds).T.copy()
        plan = planner.plan(
            step, ROWS, GENERATIONS, 0, weights=WEIGHTS[self.weights], limits=limits, floors=floors
        )
        assert plan.speculates
        return plan


def cases() -> Iterator[Case]:
    for parts in itertools.product(sorted(HEADS), SLOPES, DEPTHS, WEIGHTS, BOUNDS):
        yield Case(*parts)


@cache
def keeps_the_distribution(heads: str, lengths: Lengths) -> bool:
    """Return whether the schedule with these lengths, one for each pair of drafts, is lossless."""
    requests = pair(HEADS[heads])
    given = iter(lengths)
    distribution = batch_probs(accept_sampled, requests, lambda confidence: np.array(next(given)))
    return distribution == plain_probs(requests)


@cache
def confidences(heads: str) -> tuple[Gains, ...]:
    """Of each pair of drafts, [R, gamma] float32, in the order of `Lengths`."""
    return tuple(said for _, _, said in drafted_pairs(pair(HEADS[heads])))


def honest(planner: GuardedPlanner, plan: Plan, confidence: Gains) -> Counts:
    return planner.admit(plan, confidence)


def floors_forgotten(planner: GuardedPlanner, plan: Plan, confidence: Gains) -> Counts:
    """The mistake: the stop does not know of the floors that the admission then fills first."""
    drafts = int(planner.admit(replace(plan, floors=None), confidence).sum())
    survivals = gains(confidence, plan.weights)
    return admit(survivals, drafts, PAIR, limits=plan.limits, floors=plan.floors)


def floors_in_addition(planner: GuardedPlanner, plan: Plan, confidence: Gains) -> Counts:
    """The half fixed one: as before, but never fewer drafts than the floors ask for."""
    assert plan.floors is not None
    drafts = int(planner.admit(replace(plan, floors=None), confidence).sum())
    survivals = gains(confidence, plan.weights)
    most = max(drafts, int(plan.floors.sum()))
    return admit(survivals, most, PAIR, limits=plan.limits, floors=plan.floors)


def search_of_this_step(planner: GuardedPlanner, plan: Plan, confidence: Gains) -> Counts:
    """The mistake: the best K of all by the survivals that the admission reads."""
    survivals = gains(confidence, plan.weights)
    found = search(
        survivals,
        planner.costs.costs(plan.requests, plan.context),
        PAIR,
        limits=plan.limits,
        floors=plan.floors,
        base=None if plan.weights is None else float(plan.weights.sum()),
        must_draft=True,
    )
    return admit(survivals, found.drafts, PAIR, limits=plan.limits, floors=plan.floors)


def lengths_of(case: Case, admission: Admission, *, early_stop: bool, before: int) -> Lengths:
    """Admit by a planner that has seen the confidences number `before` in the step before."""
    planner, present = case.planner(early_stop=early_stop), confidences(case.heads)
    planner.publish(case.plan(planner, 0), ROWS, GENERATIONS, present[before % len(present)])
    plan = case.plan(planner, 1)
    assert plan.known == len(ROWS)
    return tuple(tuple(admission(planner, plan, said).tolist()) for said in present)


def admitted(lengths: Lengths) -> set[int]:
    """K of each pair of drafts."""
    return {sum(each) for each in lengths}


def broken(admission: Admission, *, early_stop: bool) -> tuple[list[Case], list[set[int]]]:
    """Cases whose distribution is not the target's, and K of all cases."""
    wrong, budgets = [], []
    for number, case in enumerate(cases()):
        lengths = lengths_of(case, admission, early_stop=early_stop, before=number)
        budgets.append(admitted(lengths))
        if not keeps_the_distribution(case.heads, lengths):
            wrong.append(case)
    return wrong, budgets


def test_algorithm_1_is_exact_under_all_floors_and_limits() -> None:
    wrong, budgets = broken(honest, early_stop=True)
    assert wrong == []
    moving = sum(len(each) > 1 for each in budgets)
    print(f"\n{len(budgets)} cases, K depends on the drafts in {moving}")
    assert moving > 100, "K never depends on the drafts: the test shows little"


def test_the_search_of_the_step_before_is_exact_under_all_floors_and_limits() -> None:
    wrong, budgets = broken(honest, early_stop=False)
    assert wrong == []
    assert all(len(each) == 1 for each in budgets), "K is fixed before drafting"
    assert set.union(*budgets) == set(range(2 * GAMMA + 1))


@pytest.mark.parametrize("mistake", [floors_forgotten, floors_in_addition, search_of_this_step])
def test_stops_in_another_order_than_the_admissions_are_caught(mistake: Admission) -> None:
    wrong, budgets = broken(mistake, early_stop=True)
    print(f"\n{mistake.__name__}: {len(wrong)} of {len(budgets)} cases break the distribution")
    assert len(wrong) >= 10
