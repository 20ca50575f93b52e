"""What a scheduled worker carries from step to step: one typed object, in one attribute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_dspark.step.device import Device
from sglang_dspark.step.draft_faults import DraftFaults
from sglang_dspark.step.engine import Step
from sglang_dspark.step.penalties import OutputCounts
from sglang_dspark.step.ranks import Engine, Ranks

STATE = "dspark_step"  # attribute of upstream's DSparkWorkerV2


@dataclass
class StepState:
    """worker: upstream's.

    ranks: those who take each step together; the engine is the leader's. planned: the step whose
    launch comes next, under the overlap loop. counts: what penalised requests have put out. faults:
    drafts that failed of late.
    """

    worker: Any
    engine: Engine
    device: Device
    ranks: Ranks = field(default_factory=Ranks)
    planned: Step | None = None
    counts: OutputCounts = field(default_factory=OutputCounts)
    faults: DraftFaults = field(default_factory=DraftFaults)


def state_of(worker: Any) -> StepState | None:
    """The state of a worker that we schedule; None of any other."""
    found: StepState | None = getattr(worker, "__dict__", {}).get(STATE)
    return found
