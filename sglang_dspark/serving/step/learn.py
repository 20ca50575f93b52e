"""Learn: a step's result has come to the host; what it says goes to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sglang_dspark.serving.step.engine import Step
from sglang_dspark.serving.step.state import StepState

STEP = "dspark_step"  # attribute of upstream's result: the step that it is of


@dataclass(frozen=True)
class InFlight:
    """step: as planned. logits: [R, gamma] on the host once the result is; None: no draft."""

    step: Step
    logits: Tensor | None


def tag(result: Any, step: Step, logits: Tensor | None) -> None:
    """Note on an upstream result which step it is of."""
    result.__dict__[STEP] = InFlight(step, logits)


def learn(state: StepState, batch: Any, result: Any) -> None:
    """The result's copies are complete and its tokens handed out: tell the engine."""
    flight: InFlight | None = result.__dict__.get(STEP)
    accepted = result.num_correct_drafts_per_req_cpu
    if flight is None or accepted is None:
        return
    lengths = result.cap_lens.numpy().astype(np.int64) - 1  # [R]
    logits = None if flight.logits is None else flight.logits.float().numpy()
    state.engine.landed(flight.step, lengths, np.asarray(accepted, np.int64), logits)
    state.engine.processed(batch.reqs, accepted, bool(lengths.any()))
