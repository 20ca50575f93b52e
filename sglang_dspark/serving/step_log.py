"""Log every finished step as a line of a file, with its predicted and its measured time.

`schedule.step_log` names the file. Lines are written as metrics are, about once a second and when
all requests have ended, so that no step writes to a file. Fields of a line, which is JSON:

    step        number of the plan; repeated ones have the same
    mode        the guard's
    requests    R
    tokens      B = R + drafts verified
    context     tokens of context of all requests together
    depth       drafted positions, 0 without a draft
    accepted    drafts accepted
    gain        tokens/s of drafting over plain decoding, as the guard estimated it for the plan
        predicted_s by the table, as corrected by earlier steps
    measured_s  null where a prefill followed, or the draft failed
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from sglang_dspark.common.files import fault
from sglang_dspark.schedule.budget import Counts
from sglang_dspark.schedule.plan import Plan

logger = logging.getLogger(__name__)


def line_of(plan: Plan, lengths: Counts, accepted: Counts, seconds: float | None) -> str:
    """Return a step's line. lengths, accepted: drafts verified and accepted, [R]."""
    return json.dumps(
        {
            "step": plan.step,
            "mode": plan.mode.value,
            "requests": plan.requests,
            "tokens": plan.requests + int(lengths.sum()),
            "context": plan.context,
            "depth": plan.budget.depth,
            "accepted": int(accepted.sum()),
            "gain": plan.gain,
            "predicted_s": plan.budget.seconds,
            "measured_s": seconds,
        }
    )


class StepLog:
    """Append to the file; a failure to write is logged once and ends the log."""

    def __init__(self, path: Path) -> None:
        self._path: Path | None = path

    def write(self, lines: Sequence[str]) -> None:
        """Append lines, each without its end."""
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            logger.warning("sglang-dspark: no more steps are logged (%s)", fault(error))
            self._path = None
