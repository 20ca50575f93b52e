"""What a draft that fails leads to: its step decodes plainly, and drafting rests for a while.

Answers need no drafts, so an error of the drafter costs time and never a request. The rest doubles
with every failure in a row, up to LONGEST_REST steps: a drafter that fails for good costs next to
nothing, one that failed once drafts again at once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

LONGEST_REST = 512  # steps


@dataclass
class DraftFaults:
    """Of one worker. in_row: failures since the last draft. rest: steps to come without a draft."""

    in_row: int = 0
    rest: int = 0

    def rests(self) -> bool:
        """Whether the step that begins leaves its draft out."""
        if self.rest == 0:
            return False
        self.rest -= 1
        return True

    def failed(self, error: Exception) -> None:
        """A draft failed: said once for all failures in a row."""
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
        """A draft was made."""
        if self.in_row:
            logger.warning("sglang-dspark: drafting works again, after %d failures", self.in_row)
            self.in_row = 0
