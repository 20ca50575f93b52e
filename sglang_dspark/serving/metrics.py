"""Export `sglang:dspark_*` in /metrics: the scheduler's decisions and the errors of its models.

Steps are collected and passed to prometheus_client about once a second, because a dozen locked
counters are slow for a step of some milliseconds, and when the last answer of a batch ends,
so that the counters of an idle server are complete. SGLang
(srt/observability/metrics_collector.py) sets PROMETHEUS_MULTIPROC_DIR before any collector is made,
so prometheus_client is imported with the first collector.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sglang_dspark.schedule.budget import Counts
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.schedule.planner_protocol import Planner
from sglang_dspark.serving.fallbacks import Fallback
from sglang_dspark.serving.step_log import StepLog, line_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PREFIX = "sglang:dspark_"
FLUSH_SECONDS = 1.0  # of the steps' clock
BUDGETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 1.0)
SURVIVAL_ERROR = "Expected calibration error of survivals, over verified drafts."
MISFIT = "1 if first drafts are accepted too seldom for a drafter that fits."
REASONS = {
    Mode.PLAIN: "drafting does not pay",
    Mode.PROBE_PLAIN: "probe of plain decoding",
    Mode.SPECULATE: "no plan with drafts",
    Mode.PROBE_SPECULATE: "no plan with drafts",
    Mode.OFF: Fallback.ACCEPTANCE_LOW.value,
}


class Finished(NamedTuple):
    """A finished step, kept until the next flush."""

    plan: Plan
    lengths: Counts
    accepted: Counts
    seconds: float | None
    undrafted: bool = False

    @property
    def reason(self) -> str:
        """Return the reason why it had no draft, if it had none."""
        return Fallback.DRAFT_FAILED.value if self.undrafted else REASONS[self.plan.mode]


class StepMetrics:
    """Count decode steps since the last flush."""

    def __init__(
        self,
        planner: Planner,
        calibration: OnlineCalibration,
        collector: Collector | None = None,
        log: StepLog | None = None,
    ) -> None:
        """Send counts to `collector`; None: do not count. log: gets each step as a line."""
        self._planner, self._calibration, self._collector = planner, calibration, collector
        self._log = log
        self._finished: list[Finished] = []
        self._due = -math.inf

    def step(
        self,
        plan: Plan,
        lengths: Counts,
        accepted: Counts,
        seconds: float | None,
        *,
        undrafted: bool = False,
    ) -> None:
        """Record a finished step; undrafted: a draft was planned, and failed or was skipped."""
        if self._collector is not None or self._log is not None:
            self._finished.append(Finished(plan, lengths, accepted, seconds, undrafted))

    def count_fallback(self, fallback: Fallback) -> None:
        """Count a fallback, at once."""
        if self._collector is not None:
            self._collector.count_fallback(fallback)

    def kernel_compiled(self) -> None:
        """Count a kernel that was compiled while serving, at once."""
        if self._collector is not None:
            self._collector.kernel_compiled()

    def drafter_misfit(self, misfit: bool) -> None:
        """Export whether the drafter was found not to fit the target, at once."""
        if self._collector is not None:
            self._collector.drafter_misfit(misfit)

    def flush(self, now: float) -> None:
        """Hand over the recorded steps, if the last flush was about a second ago."""
        if now >= self._due:
            self._due = now + FLUSH_SECONDS
            self.hand_over()

    def hand_over(self) -> None:
        """Pass the recorded steps to the collector and the log now."""
        if not self._finished:
            return
        finished, self._finished = self._finished, []
        if self._collector is not None:
            self._collector.take(finished, self._planner.gamma)
            self._collector.gauges(self._planner, self._calibration)
        if self._log is not None:
            self._log.write([line_of(f.plan, f.lengths, f.accepted, f.seconds) for f in finished])


def reached(lengths: Sequence[Counts], gamma: int) -> Counts:
    """Count the drafts at each position 1 .. gamma in all steps: [gamma]."""
    ended = np.bincount(np.concatenate(lengths), minlength=gamma + 1)
    return ended[::-1].cumsum()[::-1][1:]


class Collector:
    """Counters and gauges of prometheus_client; made once a process."""

    def __init__(self, labels: dict[str, str], registry: CollectorRegistry | None = None) -> None:
        """Register the metrics in `registry`; None: the registry of the process."""
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        self._labels, names, self._counted_fallbacks = labels, tuple(labels), 0
        place: Any = {"registry": REGISTRY if registry is None else registry}
        latest = {**place, "multiprocess_mode": "mostrecent"}

        def counter(name: str, text: str, *more: str) -> Any:
            return Counter(PREFIX + name, text, (*names, *more), **place)

        def gauge(name: str, text: str, *more: str) -> Any:
            return Gauge(PREFIX + name, text, (*names, *more), **latest)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(PREFIX + name, text, names, buckets=buckets, **place).labels(**labels)

        self._steps = counter("steps", "Decode steps by the guard's mode.", "mode")
        self._skips = counter("draft_skips", "Decode steps without a draft.", "reason")
        self._fallbacks = counter(
            "fallbacks", "Fallbacks to a slower or less accurate mode.", "reason"
        )
        self._admitted = counter("admitted_drafts", "Drafts verified.", "position")
        self._accepted = counter("accepted_drafts", "Drafts accepted.", "position")
        self._budget = histogram("budget", "Drafts admitted in a step.", BUDGETS)
        self._measured = histogram("step_seconds", "Measured step time.", SECONDS)
        self._predicted = histogram("predicted_step_seconds", "Predicted step time.", SECONDS)
        self._error = gauge("step_time_error", "Median |predicted / measured - 1| of late.")
        self._gain = gauge("gain", "Tokens/s of speculating over plain, as of the last step.")
        self._gap = gauge(
            "calibration_error",
            "|acceptance - confidence| of late, mean over recent drafts.",
            "position",
        )
        self._survival_error = gauge("survival_error", SURVIVAL_ERROR)
        self._outliers = gauge("step_time_outliers", "Steps taken for outliers since the start.")
        self._compilations = counter("kernel_compilations", "Kernels compiled while serving.")
        self._compilations.labels(**labels)  # 0 is shown too
        self._misfit = gauge("drafter_misfit", MISFIT).labels(**labels)
        self._misfit.set(0)  # with several processes a gauge is exported only once it is set

    def take(self, steps: Sequence[Finished], gamma: int) -> None:
        """Count steps."""
        for mode, count in Tally(step.plan.mode for step in steps).items():
            self._steps.labels(**self._labels, mode=mode.value).inc(count)
        skipped = Tally(step.reason for step in steps if not step.plan.speculates)
        for reason, count in skipped.items():
            self._skips.labels(**self._labels, reason=reason).inc(count)
        for step in steps:
            self._budget.observe(int(step.lengths.sum()))
            if step.seconds is not None:
                self._measured.observe(step.seconds)
                self._predicted.observe(step.plan.budget.seconds)
        self._gain.labels(**self._labels).set(steps[-1].plan.gain)
        for series, drafts in (
            (self._admitted, [step.lengths for step in steps]),
            (self._accepted, [step.accepted for step in steps]),
        ):
            for position, count in enumerate(reached(drafts, gamma), start=1):
                series.labels(**self._labels, position=str(position)).inc(int(count))

    def gauges(self, planner: Planner, calibration: OnlineCalibration) -> None:
        """Set the gauges of the models' present errors."""
        error = planner.costs.median_error()
        if not math.isnan(error):
            self._error.labels(**self._labels).set(error)
        self._outliers.labels(**self._labels).set(planner.costs.outliers)
        gaps = np.abs(calibration.gaps()).max(axis=0)
        for position, gap in enumerate(gaps, start=1):
            self._gap.labels(**self._labels, position=str(position)).set(float(gap))
        survival_error = calibration.survival_error()
        if not math.isnan(survival_error):
            self._survival_error.labels(**self._labels).set(survival_error)
        fallbacks = planner.fallbacks
        if fallbacks > self._counted_fallbacks:
            self.count_fallback(Fallback.DRAFTS_LOSE, fallbacks - self._counted_fallbacks)
            self._counted_fallbacks = fallbacks

    def count_fallback(self, fallback: Fallback, times: int = 1) -> None:
        """Count fallbacks."""
        self._fallbacks.labels(**self._labels, reason=fallback.value).inc(times)

    def kernel_compiled(self) -> None:
        """Count a kernel that was compiled while serving."""
        self._compilations.labels(**self._labels).inc()

    def drafter_misfit(self, misfit: bool) -> None:
        """Set whether the drafter was found not to fit the target."""
        self._misfit.set(misfit)
