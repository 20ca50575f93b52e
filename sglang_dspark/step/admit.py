"""Admit: find how many drafts of each request are verified; the same windows on every rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dspark.step.engine import Step
from sglang_dspark.step.plan import greedy_requests
from sglang_dspark.step.state import StepState


def admit(state: StepState, step: Step, batch: Any, logits: Tensor | None) -> Tensor:
    """Return indptr [R + 1] int32 on the device: request r verifies its anchor and l_r drafts.

    logits: [R, d] confidence logits of this step's drafts; None where there are none.
    """
    admitted = None
    if state.ranks.leads:
        with state.ranks.admitting(step.plan):
            admitted = state.device.admit(state.engine, step, logits, greedy_requests(batch))
    return state.ranks.windows(step.plan, admitted)
