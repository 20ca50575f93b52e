"""Warn of a drafter that does not fit its target, and switch drafting off below a minimum.

The target rejects every draft of such a drafter: that costs time, never a token, and no other
log line shows it. Statistics: schedule/first_drafts.py; they restart after a weight update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sglang_dspark.schedule.budget import Counts
from sglang_dspark.schedule.first_drafts import FITTING, Finding, FirstDrafts
from sglang_dspark.serving import weight_updates
from sglang_dspark.serving.fallbacks import Fallback
from sglang_dspark.serving.metrics import StepMetrics

logger = logging.getLogger(__name__)

CAUSES = (
    "Likely causes, the likeliest first: its block layout (sample_from_anchor), its rope_theta or "
    "rope scaling, the layers it reads (target_layer_ids), weights older than the target's after a "
    "weight update, prompts unlike its training. Run `dspark doctor --serve ARGUMENTS` and `dspark "
    "eval --target TARGET --drafter DRAFTER`: if k = 1 is as low there, compare config.json with "
    "the training, or write a published drafter's again by `dspark models convert`; if not, train "
    "on your prompts"
)

# Steps that may have been decoded before an update and are learned from after it: three in flight,
# and a batch of four that is learned from together (engine.py).
STALE = 8


class DrafterFit:
    """Watch one server's first drafts."""

    def __init__(
        self,
        drafts: FirstDrafts,
        metrics: StepMetrics | None = None,
        renew: Callable[[], None] | None = None,
    ) -> None:
        """Report findings to `metrics` and the log. renew: called after an update of weights."""
        self._drafts, self._metrics, self._renew = drafts, metrics, renew
        self._updates, self._stale = weight_updates.updates(), 0
        self._warned = self._stopped = False  # logged since the last update of weights

    def observe(self, rows: Counts, generations: Counts, accepted: Counts, lengths: Counts) -> None:
        """Count a finished step, [R] int64 each; log each kind of finding once."""
        self._renew_if_updated()
        if self._stale > 0:
            self._stale -= 1
            return
        found = self._drafts.observe(rows, generations, accepted, lengths)
        if found is not None:
            self._report(found)

    def rests(self) -> bool:
        """Return whether the step that is planned has no drafts; call once for each plan."""
        self._renew_if_updated()
        return self._drafts.rests()

    def examines(self) -> bool:
        """Return whether the planned step drafts even if that may be slower; call once a plan."""
        return self._drafts.examines()

    def _renew_if_updated(self) -> None:
        updates = weight_updates.updates()
        if updates != self._updates:
            self._updates, self._stale = updates, STALE
            self._drafts.renew()
            self._warned = self._stopped = False
            self._export(misfit=False)
            if self._renew is not None:
                self._renew()

    def _report(self, found: Finding) -> None:
        self._export(misfit=found.below)
        seen = f"{found.accepted} of {found.verified} first drafts were accepted"
        if found.stops:
            if self._metrics is not None:
                self._metrics.count_fallback(Fallback.ACCEPTANCE_LOW)
            if not self._stopped:
                logger.warning(
                    "sglang-dspark: drafting is switched off: %s, which is below "
                    "schedule.min_acceptance. It is tried again seldom, and after a weight "
                    "update.%s",
                    seen,
                    "" if self._warned else f" {CAUSES}",
                )
            self._stopped = self._warned = True
        elif found.below and not self._warned:
            logger.warning(
                "sglang-dspark: the drafter does not fit the target: %s, and one that fits has "
                "more than %.0f%%. Answers are right, but drafts are slow. %s",
                seen,
                100 * FITTING,
                CAUSES,
            )
            self._warned = True

    def _export(self, *, misfit: bool) -> None:
        if self._metrics is not None:
            self._metrics.drafter_misfit(misfit)
