"""Learn: a step's result has come to the host; what it says goes to the engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_dspark.step.engine import Step
from sglang_dspark.step.spans import span
from sglang_dspark.step.state import StepState

STEP = "dspark_step"  # attribute of upstream's result: the step that it is of


def tag(result: Any, step: Step) -> Any:
    """The upstream result, with a note of which step it is of."""
    result.__dict__[STEP] = step
    return result


def learn(state: StepState, batch: Any, result: Any) -> None:
    """The result's copies are complete and its tokens handed out: tell the engine."""
    step: Step | None = result.__dict__.get(STEP)
    accepted = result.num_correct_drafts_per_req_cpu
    if step is None or accepted is None:
        return
    lengths = result.cap_lens.numpy().astype(np.int64) - 1  # [R]
    with span("learn"):
        state.engine.landed(step, lengths, np.asarray(accepted, np.int64))
        state.engine.processed(batch.reqs, accepted, bool(lengths.any()))
