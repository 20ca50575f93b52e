"""What a scheduled worker carries from step to step: one typed object, in one attribute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dspark.serving.step.device import Device
from sglang_dspark.serving.step.engine import ScheduleEngine, Step

STATE = "dspark_step"  # attribute of upstream's DSparkWorkerV2


@dataclass
class StepState:
    """worker: upstream's. proposers: upstream's, by the depth that each drafts to.

    planned: the step whose launch comes next, under the overlap loop.
    """

    worker: Any
    engine: ScheduleEngine
    device: Device
    proposers: Mapping[int, Any]
    planned: Step | None = None


def state_of(worker: Any) -> StepState | None:
    """The state of a worker that we schedule; None of any other."""
    found: StepState | None = getattr(worker, "__dict__", {}).get(STATE)
    return found
