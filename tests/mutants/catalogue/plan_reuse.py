"""Faults of plans that serve further steps."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINE = "sglang_dspark/step/engine.py"
REUSE = "sglang_dspark/step/plan_reuse.py"
ENGINE_TESTS = "tests/step/test_plan_reuse.py"

MUTANTS = (
    Mutant(
        name="a new generation goes by the plan of the one before",
        area="engine",
        file=REUSE,
        old=" and (generation.numpy()[slots] == last.generations).all()",
        new="",
        tests=(f"{ENGINE_TESTS}::test_another_step_is_planned_afresh",),
    ),
    Mutant(
        name="limits of a request are passed over by a kept plan",
        area="engine",
        file=REUSE,
        old="starts and limits is None and",
        new="starts and",
        tests=(f"{ENGINE_TESTS}::test_another_step_is_planned_afresh",),
    ),
    Mutant(
        name="a plan of limited requests is kept without limits",
        area="engine",
        file=REUSE,
        old="plan.weights is None and not step.limited",
        new="plan.weights is None",
        tests=(f"{ENGINE_TESTS}::test_another_step_is_planned_afresh",),
    ),
    Mutant(
        name="a plan of many requests is kept",
        area="engine",
        file=REUSE,
        old="plan.known == plan.requests <= FEW",
        new="plan.known == plan.requests",
        tests=(f"{ENGINE_TESTS}::test_a_plan_of_more_requests_serves_one_step",),
    ),
    Mutant(
        name="a plan by no confidence is kept",
        area="engine",
        file=REUSE,
        old="drafts and alike and plan.known == plan.requests <= FEW",
        new="drafts and alike and plan.requests <= FEW",
        tests=(f"{ENGINE_TESTS}::test_a_plan_without_confidences_serves_one_step",),
    ),
    Mutant(
        name="a step by a kept plan teaches nothing",
        area="engine",
        file=ENGINE,
        old="if not last.plan.speculates:",
        new="if True:",
        tests=(f"{ENGINE_TESTS}::test_a_plan_of_few_requests_that_draft_serves_four_steps",),
    ),
    Mutant(
        name="a step by a kept plan is none of the guard's",
        area="engine",
        file="sglang_dspark/schedule/guarded.py",
        old="        self.guard.kept(plan.requests)\n",
        new="",
        tests=(f"{ENGINE_TESTS}::test_a_plan_of_few_requests_that_draft_serves_four_steps",),
    ),
    Mutant(
        name="plans made ahead are kept",
        area="engine",
        file=REUSE,
        old="same = starts and limits is None",
        new="same = limits is None",
        tests=(f"{ENGINE_TESTS}::test_a_plan_made_ahead_serves_one_step",),
    ),
    Mutant(
        name="a plan that verifies nothing is kept",
        area="engine",
        file=REUSE,
        old="plan.mode is Mode.SPECULATE and plan.budget.drafts > 0",
        new="plan.mode is Mode.SPECULATE",
        tests=(f"{ENGINE_TESTS}::test_a_plan_without_drafts_serves_one_step",),
    ),
)
