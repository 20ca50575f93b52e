"""Mode static: every draft that the requests allow is verified, and nothing is measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_dspark.schedule.budget import Budget
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.step.engine_protocol import StepRequests, VerifyAll

ROWS, GENERATION = torch.tensor([4, 1]), torch.tensor([0, 7, 0, 0, 9])
LENGTHS = torch.tensor([10, 33])


def test_all_drafts_are_planned_and_admitted() -> None:
    engine = VerifyAll(3)
    first, second = (engine.begin(StepRequests(ROWS, GENERATION, LENGTHS)) for _ in range(2))
    assert (first.plan.step, second.plan.step) == (0, 1)
    assert first.plan.budget == Budget(6, 3, 0.0, 0.0)
    assert (first.plan.requests, first.plan.context) == (2, 43)
    assert (first.plan.mode, first.plan.settled, first.plan.gain) == (Mode.SPECULATE, True, 1.0)
    assert (first.plan.floors, first.plan.known, first.limited) == (None, 0, False)
    assert first.rows.tolist() == [4, 1]
    assert engine.admit(first, None).tolist() == [3, 3]


def test_what_requests_allow_is_kept() -> None:
    engine = VerifyAll(3)
    step = engine.begin(StepRequests(ROWS, GENERATION, LENGTHS, limits=np.array([0, 2])))
    assert (step.plan.budget, step.limited) == (Budget(2, 3, 0.0, 0.0), True)
    assert engine.admit(step, None).tolist() == [0, 2]
    nothing = engine.begin(StepRequests(ROWS, GENERATION, LENGTHS, limits=np.array([0, 0])))
    assert nothing.plan.budget == Budget(0, 0, 0.0, 0.0)
    assert engine.admit(nothing, None).tolist() == [0, 0]


def test_a_draft_that_failed_verifies_nothing() -> None:
    engine = VerifyAll(3)
    step = engine.begin(StepRequests(ROWS, GENERATION, LENGTHS))
    engine.skip_draft(step, failed=True)
    assert step.undrafted
    assert engine.admit(step, None).tolist() == [0, 0]


def test_an_accelerators_admission_has_no_calibration_here() -> None:
    engine = VerifyAll(3)
    with pytest.raises(AssertionError, match="only a host admits without a schedule"):
        engine.calibrate(engine.begin(StepRequests(ROWS, GENERATION, LENGTHS)))
