"""`sglang:dspark_*` in /metrics: what the scheduler decided, and how right it was.

Steps are counted in plain integers and handed to prometheus_client about once a second, because a
step of some milliseconds has no time for a dozen locked counters. SGLang (0.5.23,
srt/observability/metrics_collector.py) sets PROMETHEUS_MULTIPROC_DIR before any collector is made,
so prometheus_client is imported when the first one is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sglang_dspark.schedule.budget import Counts
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.planner import Plan, StepPlanner

PREFIX = "sglang:dspark_"
FLUSH_SECONDS = 1.0
BUDGETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 1.0)
REASONS = {
    Mode.PLAIN: "drafting does not pay",
    Mode.PROBE_PLAIN: "probe of plain decoding",
    Mode.SPECULATE: "no plan with drafts",
    Mode.PROBE_SPECULATE: "no plan with drafts",
}


class StepMetrics:
    """Counts of decode steps since the last flush."""

    def __init__(
        self,
        planner: StepPlanner,
        calibration: OnlineCalibration,
        collector: Collector | None = None,
    ) -> None:
        """collector: where counts go; None keeps them here only."""
        self._planner, self._calibration, self._collector = planner, calibration, collector
        gamma = planner.gamma
        self.admitted = np.zeros(gamma + 1, np.int64)  # by position, from 1
        self.accepted = np.zeros(gamma + 1, np.int64)
        self.steps: dict[tuple[str, str], int] = {}  # (mode, reason without draft) -> steps
        self.budgets: list[int] = []
        self.measured: list[float] = []
        self.predicted: list[float] = []
        self._due = -math.inf

    def step(
        self, plan: Plan, lengths: Counts, accepted: Counts, seconds: float | None, now: float
    ) -> None:
        """Count a finished step; flush about once a second."""
        reason = "" if plan.speculates else REASONS[plan.mode]
        key = (plan.mode.value, reason)
        self.steps[key] = self.steps.get(key, 0) + 1
        if plan.speculates:
            self.admitted += _reached(lengths, self.admitted)
            self.accepted += _reached(accepted, self.accepted)
        self.budgets.append(int(lengths.sum()))
        if seconds is not None:
            self.measured.append(seconds)
            self.predicted.append(plan.budget.seconds)
        if now >= self._due:
            self._due = now + FLUSH_SECONDS
            self.flush()

    def flush(self) -> None:
        """Hand everything over and start from zero; without a collector only the latter."""
        if self._collector is not None:
            self._collector.take(self)
            self._collector.gauges(self._planner, self._calibration)
        self.admitted[:], self.accepted[:] = 0, 0
        self.steps.clear()
        for series in (self.budgets, self.measured, self.predicted):
            series.clear()


def _reached(lengths: Counts, like: Counts) -> Counts:
    """How many requests hold a draft at each position 0 .. gamma (0: all requests)."""
    ended = np.bincount(lengths, minlength=len(like))
    return ended[::-1].cumsum()[::-1]


class Collector:
    """The prometheus_client side; made once a process."""

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        names = tuple(labels)
        self._labels = labels

        def counter(name: str, text: str, *more: str) -> Any:
            return Counter(PREFIX + name, text, (*names, *more))

        def gauge(name: str, text: str, *more: str) -> Any:
            return Gauge(PREFIX + name, text, (*names, *more), multiprocess_mode="mostrecent")

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(PREFIX + name, text, names, buckets=buckets).labels(**labels)

        self._steps = counter("steps", "Decode steps by the guard's mode.", "mode")
        self._skips = counter("draft_skips", "Decode steps without a draft.", "reason")
        self._falls = counter("fallbacks", "Times that a load fell back to plain.", "reason")
        self._admitted = counter("admitted_drafts", "Drafts verified.", "position")
        self._accepted = counter("accepted_drafts", "Drafts accepted.", "position")
        self._budget = histogram("budget", "Drafts admitted in a step.", BUDGETS)
        self._measured = histogram("step_seconds", "Measured step time.", SECONDS)
        self._predicted = histogram("predicted_step_seconds", "Predicted step time.", SECONDS)
        self._error = gauge("step_time_error", "Median |predicted / measured - 1| of late.")
        self._gap = gauge(
            "calibration_error",
            "|acceptance - confidence| of late, mean over recent drafts.",
            "position",
        )
        self._outliers = gauge("step_time_outliers", "Steps taken for outliers since the start.")
        self._fallen = 0

    def take(self, counts: StepMetrics) -> None:
        """Add counts of steps."""
        for (mode, reason), steps in counts.steps.items():
            self._steps.labels(**self._labels, mode=mode).inc(steps)
            if reason:
                self._skips.labels(**self._labels, reason=reason).inc(steps)
        for series, drafts in (
            (self._admitted, counts.admitted),
            (self._accepted, counts.accepted),
        ):
            for position in range(1, len(drafts)):
                series.labels(**self._labels, position=str(position)).inc(int(drafts[position]))
        for budget in counts.budgets:
            self._budget.observe(budget)
        for seconds, predicted in zip(counts.measured, counts.predicted, strict=True):
            self._measured.observe(seconds)
            self._predicted.observe(predicted)

    def gauges(self, planner: StepPlanner, calibration: OnlineCalibration) -> None:
        """Show how right the models are at present."""
        error = planner.costs.median_error()
        if not math.isnan(error):
            self._error.labels(**self._labels).set(error)
        self._outliers.labels(**self._labels).set(planner.costs.outliers)
        gaps = np.abs(calibration.gaps()).max(axis=0)
        for position, gap in enumerate(gaps, start=1):
            self._gap.labels(**self._labels, position=str(position)).set(float(gap))
        fallbacks = planner.guard.fallbacks
        if fallbacks > self._fallen:
            self._falls.labels(**self._labels, reason="realised gain").inc(fallbacks - self._fallen)
            self._fallen = fallbacks
