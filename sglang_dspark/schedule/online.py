"""Calibrate confidence online, from outcomes: c_k = sigmoid(u_k logit_k + v_k + s_r).

It starts from the fitted table (u = 1 / T, v = shift / T; paper, 3.2.1, and `calibration.py`) and
makes one damped Newton step of the logistic loss for each draft. s_r is the request's own shift
(`request_shift.py`), if the caller passes the requests' slots. u and v are fitted with s_r
included, so that the two do not correct the same error twice. A draft counts only if it was
reached: verified, with all drafts before it accepted. Which drafts are verified never depends on
their own outcome, so skipped drafts cause no bias. The label is the outcome under the request's own
sampling.

Outcomes fade slowly. A position may deviate from its predictions by more than chance allows,
because its traffic has changed. It then drops most of its memory at once and adapts quickly. Steps
and parameters are bounded, so a burst cannot spoil the calibration for long.

Confidences use parameters of finished steps only, so the schedule stays lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.budget import Counts, Gains
from sglang_dspark.schedule.calibration import Calibration
from sglang_dspark.schedule.compiled import compiled
from sglang_dspark.schedule.request_shift import RequestShift

Floats = NDArray[np.float64]
Slots = tuple[Counts, Counts]  # rows of the pool and their generations, [R] int64 each
U_LOW, U_HIGH, V_LIMIT = 0.1, 10.0, 10.0  # T in 0.1 .. 10, as the grid of the fit
FEW = 50.0  # drafts; a gap over fewer is reported smaller
LOGIT_LIMIT = 15.0  # beyond it the sigmoid is saturated
BINS = 10  # of survivals, for `survival_error`
LONG_MEMORY = 10_000.0  # memory of `survival_error`, in verified drafts
_NO_SHIFTS: Floats = np.empty(0)  # means a shift of 0 for every request


@dataclass(frozen=True)
class OnlineConfig:
    """Rates of online calibration.

    memory: drafts after which an outcome has faded to 1/e. start: weight of the table, in drafts.
    bound: largest change of a parameter by one draft. alarm_memory: drafts over which deviations
    are watched; alarm: standard deviations that count as a change; keep: memory left after one.
    """

    memory: float = 1500.0
    start: float = 60.0
    bound: float = 0.2
    alarm_memory: float = 100.0
    alarm: float = 4.0
    keep: float = 0.05

    def __post_init__(self) -> None:
        if min(self.memory, self.start, self.alarm_memory) < 1 or self.bound <= 0:
            raise ValueError(f"memories at least 1 and bound above 0: {self}")
        if self.alarm <= 0 or not 0 <= self.keep <= 1:
            raise ValueError(f"alarm above 0 and keep in [0, 1]: {self}")


class OnlineCalibration:
    """Parameters by regime (greedy, sampled, ...) and position."""

    def __init__(
        self,
        starts: Sequence[Calibration],
        config: OnlineConfig | None = None,
        *,
        pool_rows: int | None = None,
    ) -> None:
        """Start from the table of each regime. Raises ValueError unless all are for one gamma.

        pool_rows: rows of the request pool; None: no request has its own shift. The variance of
        these shifts is each table's `spread`.
        """
        if not starts or len({len(each.temperatures) for each in starts}) != 1:
            raise ValueError("one table for each regime is needed, all for the same gamma")
        self.config = config or OnlineConfig()
        self.gamma = len(starts[0].temperatures)
        shape = (len(starts), self.gamma)
        temperature = np.array([each.temperatures for each in starts], np.float64)
        shift = np.array([each.shifts for each in starts], np.float64)
        self._u = np.clip(1.0 / temperature, U_LOW, U_HIGH)
        self._v = np.clip(shift / temperature, -V_LIMIT, V_LIMIT)
        self._information = np.zeros((*shape, 3))  # of (u, v): uu, uv, vv
        self._information[..., 0] = self._information[..., 2] = 0.15 * self.config.start
        self._stray = np.zeros((*shape, 2))  # faded sums of outcome - c and of c (1 - c)
        self._gap = np.zeros((*shape, 2))  # faded sums over `memory` of outcome - c and of drafts
        self._changes = np.zeros(shape, np.int64)
        self._bins = np.zeros((BINS, 2))  # faded sums of survival - label, and counts
        spreads = [each.spread for each in starts]
        self._follower = None if pool_rows is None else RequestShift(spreads, pool_rows)

    def confidence(
        self, logits: Gains, regimes: Counts, out: Gains, slots: Slots | None = None
    ) -> Gains:
        """Return calibrated conditional survivals of drafts with confidence logits [R, d].

        regimes: [R] int64. out: [R, >= d] float32, written in the first d columns, returned. slots:
        rows and generations of the requests, for their own shifts; None: the average. A NaN or
        infinite logit has confidence 0, and `observe` skips it.
        """
        _confidence(logits, regimes, self._shifts(slots), self._u, self._v, out)
        return out

    def lines(self, regimes: Counts, slots: Slots | None = None) -> tuple[Floats, Floats]:
        """Return slopes u and shifts v [R, gamma]: `confidence` is sigmoid(u x + v) of a logit x.

        regimes: [R] int64. slots: as for `confidence`. A device computes confidences from them.
        """
        own = self._shifts(slots)
        shifts = self._v[regimes] if own is _NO_SHIFTS else self._v[regimes] + own[:, None]
        return self._u[regimes], shifts

    def observe(
        self,
        logits: Gains,
        regimes: Counts,
        accepted: Counts,
        verified: Counts,
        slots: Slots | None = None,
        confidence: Gains | None = None,
    ) -> None:
        """Learn the outcomes of a finished step: logits [R, d], the rest [R] int64, verified <= d.

        slots, confidence: input and output of `confidence` in that step, [R, >= d]; both or
        neither. Raises ValueError unless 0 <= accepted <= verified <= d.
        """
        if ((accepted < 0) | (accepted > verified) | (verified > logits.shape[1])).any():
            raise ValueError("0 <= accepted <= verified <= drafted must hold")
        config = self.config
        settings = (config.memory, config.bound, config.alarm_memory, config.alarm, config.keep)
        _observe(
            logits, regimes, accepted, verified, self._shifts(slots), settings,
            0.15 * config.start,
            self._u, self._v, self._information, self._stray, self._gap, self._changes,
        )  # fmt: skip
        if slots is not None and confidence is not None:
            _bin_survivals(confidence, accepted, verified, self._bins)
            if self._follower is not None:
                rows, generations = slots
                self._follower.observe(rows, generations, regimes, confidence, accepted, verified)

    def _shifts(self, slots: Slots | None) -> Floats:
        if slots is None or self._follower is None:
            return _NO_SHIFTS
        return self._follower.shifts(*slots)

    def gaps(self) -> Floats:
        """Return the mean outcome - c of recent drafts, [regimes, gamma]; smaller for few."""
        return self._gap[..., 0] / np.maximum(self._gap[..., 1], FEW)

    def survival_error(self) -> float:
        """Return the expected calibration error, in ten bins, of the survivals used for admission.

        It covers about the last 10,000 verified drafts; on few it is mostly noise. NaN before any.
        """
        count = self._bins[:, 1].sum()
        return float(np.abs(self._bins[:, 0]).sum() / count) if count > 0 else float("nan")

    @property
    def changes(self) -> int:
        """Return the number of detected changes of traffic, over all positions."""
        return int(self._changes.sum())

    def calibration(self, regime: int) -> tuple[Floats, Floats]:
        """Return the temperatures and shifts, [gamma] each: c = sigmoid((logit + shift) / T)."""
        return 1.0 / self._u[regime], self._v[regime] / self._u[regime]


@compiled
def _confidence(logits, regimes, shifts, u, v, out) -> None:  # type: ignore[no-untyped-def]
    for r in range(logits.shape[0]):
        g = regimes[r]
        own = shifts[r] if len(shifts) else 0.0
        for k in range(logits.shape[1]):
            if not np.isfinite(logits[r, k]):
                out[r, k] = np.float32(0.0)
                continue
            x = min(max(np.float64(logits[r, k]), -LOGIT_LIMIT), LOGIT_LIMIT)
            out[r, k] = np.float32(1.0 / (1.0 + np.exp(-(u[g, k] * x + v[g, k] + own))))


@compiled
def _observe(  # type: ignore[no-untyped-def]
    logits, regimes, accepted, verified, shifts, settings, floor, u, v, information, stray, gap,
    changes
) -> None:  # fmt: skip
    memory, bound, alarm_memory, alarm, keep = settings
    for r in range(logits.shape[0]):
        g = regimes[r]
        own = shifts[r] if len(shifts) else 0.0
        for k in range(min(verified[r], accepted[r] + 1)):
            if not np.isfinite(logits[r, k]):
                continue
            x = min(max(np.float64(logits[r, k]), -LOGIT_LIMIT), LOGIT_LIMIT)
            c = 1.0 / (1.0 + np.exp(-(u[g, k] * x + v[g, k] + own)))
            error = (1.0 if accepted[r] > k else 0.0) - c
            known = information[g, k]
            _fade(known, 1.0 - 1.0 / memory, floor)
            weight = max(c * (1.0 - c), 0.01)
            known[0] += weight * x * x
            known[1] += weight * x
            known[2] += weight
            scale = known[0] * known[2] - known[1] * known[1]
            du = error * (known[2] * x - known[1]) / scale
            dv = error * (known[0] - known[1] * x) / scale
            u[g, k] = min(max(u[g, k] + min(max(du, -bound), bound), U_LOW), U_HIGH)
            v[g, k] = min(max(v[g, k] + min(max(dv, -bound), bound), -V_LIMIT), V_LIMIT)
            gap[g, k, 0] += error - gap[g, k, 0] / memory
            gap[g, k, 1] += 1.0 - gap[g, k, 1] / memory
            stray[g, k, 0] += error - stray[g, k, 0] / alarm_memory
            stray[g, k, 1] += weight - stray[g, k, 1] / alarm_memory
            # The sum's variance is half the faded sum of variances: weights enter squared.
            if stray[g, k, 0] ** 2 > alarm * alarm * 0.5 * max(stray[g, k, 1], 5.0):
                _fade(known, keep, floor)
                stray[g, k] = 0.0
                changes[g, k] += 1


@compiled
def _bin_survivals(confidence, accepted, verified, bins) -> None:  # type: ignore[no-untyped-def]
    drafts = 0
    for r in range(confidence.shape[0]):
        drafts += verified[r]
    fade = np.exp(-drafts / LONG_MEMORY)
    for b in range(bins.shape[0]):
        bins[b, 0] *= fade
        bins[b, 1] *= fade
    for r in range(confidence.shape[0]):
        survival = 1.0
        for k in range(verified[r]):
            survival *= np.float64(confidence[r, k])
            b = min(int(survival * BINS), BINS - 1)
            bins[b, 0] += survival - (1.0 if k < accepted[r] else 0.0)
            bins[b, 1] += 1.0


@compiled
def _fade(known, keep, floor) -> None:  # type: ignore[no-untyped-def]
    """Fade information down to the floor, which keeps the equations solvable."""
    known[0] = floor + keep * (known[0] - floor)
    known[1] = keep * known[1]
    known[2] = floor + keep * (known[2] - floor)
