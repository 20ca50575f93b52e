"""Keep the state of a worker that we schedule: one typed object."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_dspark.serving.warm_up import is_made_up
from sglang_dspark.step.device import Device
from sglang_dspark.step.engine_protocol import Engine, Step
from sglang_dspark.step.penalties import OutputCounts
from sglang_dspark.step.ranks import Ranks

logger = logging.getLogger(__name__)

LONGEST_REST = 512  # steps: with a drafter that always fails, one step in 513 tries it


@dataclass
class DraftFaults:
    """Skip drafts after a draft failed: the pause doubles with every failure in a row.

    Results need no drafts, so an error of the drafter costs time and never a request.
    in_row: failures since the last draft. rest: coming steps without a draft.
    """

    in_row: int = 0
    rest: int = 0

    def rests(self) -> bool:
        """Return whether the step that begins skips its draft."""
        if self.rest == 0:
            return False
        self.rest -= 1
        return True

    def failed(self, error: Exception) -> None:
        """Count a failed draft; log it once for all failures in a row."""
        if self.in_row == 0:
            logger.warning(
                "sglang-dspark: a draft failed (%s: %s); its step decodes without drafts, and so "
                "do some after it, until drafting works again",
                type(error).__name__,
                error,
                exc_info=error,
            )
        self.rest = min(1 << min(self.in_row, 32), LONGEST_REST)
        self.in_row += 1

    def drafted(self) -> None:
        """End the pause: a draft was made."""
        if self.in_row:
            logger.warning("sglang-dspark: drafting works again, after %d failures", self.in_row)
            self.in_row = 0


@dataclass
class StepState:
    """State of a worker between steps.

    worker: upstream's. planned: the step that is launched next, with overlap. end_warm_up: called
    once, at the first request that is not of the server's own warm-up; None afterwards, or without
    a warm-up.
    """

    worker: Any
    engine: Engine
    device: Device
    ranks: Ranks = field(default_factory=Ranks)
    planned: Step | None = None
    counts: OutputCounts = field(default_factory=OutputCounts)
    faults: DraftFaults = field(default_factory=DraftFaults)
    end_warm_up: Callable[[], None] | None = None

    def prefills(self, batch: Any) -> None:
        """Record a prefill: the last decode step gets no time, and a warm-up may end."""
        self.engine.interrupted()
        self.device.begin_prefill(batch)
        if self.end_warm_up is not None and not is_made_up(batch.reqs):
            self.end_warm_up()
            self.end_warm_up = None


def state_of(worker: Any) -> StepState | None:
    """Return the state of a worker that we schedule; None for any other."""
    state: StepState | None = getattr(worker, "dspark_step", None)
    return state
