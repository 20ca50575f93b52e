"""Calibrate confidence online, from outcomes: c_k = sigmoid(u_k logit_k + v_k + s_r).

It starts from the fitted table (u = 1 / T, v = shift / T; paper, 3.2.1, and `calibration.py`) and
takes one damped Newton step of the logistic loss a draft. s_r is the request's own shift
(`request_shift.py`), where the caller says which requests there are: u and v are learned with it in
place, so that both together, not each alone, answer for an outcome. A draft counts only if it was
reached: verified, with all drafts before it accepted. Which drafts are verified never depends on
their own outcome, so skipped drafts cause no bias, and the label is the outcome under the request's
own sampling.

Memory fades slowly. A position whose outcomes stray from what was predicted by more than chance
allows (its traffic has changed) gives up most of its memory at once and learns anew. Steps and
parameters are bounded, so no burst can throw the calibration off for long.

Confidences come from finished steps' parameters only: the schedule stays lossless.
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
FEW = 50.0  # drafts below which a gap is shown smaller than it is
LOGIT_LIMIT = 15.0  # beyond it a sigmoid says the same
BINS = 10  # of survivals, for `survival_error`
LONG_MEMORY = 10_000.0  # verified drafts that `survival_error` is taken over
_NO_SHIFTS: Floats = np.empty(0)  # stands for a shift of 0 for everyone


@dataclass(frozen=True)
class OnlineConfig:
    """memory: drafts after which an outcome has faded to 1/e. start: drafts that the table is
    worth. bound: most that one draft moves a parameter. alarm_memory: drafts over which straying
    is watched; alarm: standard deviations that count as a change; keep: memory left after one.
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
        """starts: the table of each regime, all for one gamma. Raises ValueError otherwise.

        pool_rows: rows that requests can hold; None follows no request by itself. How far
        requests stray is each table's `spread`.
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
        self._gap = np.zeros((*shape, 2))  # the same over `memory`, and how many
        self._changes = np.zeros(shape, np.int64)
        self._bins = np.zeros((BINS, 2))  # faded sums of survival - label, and counts
        spreads = [each.spread for each in starts]
        self._follower = None if pool_rows is None else RequestShift(spreads, pool_rows)

    def confidence(
        self, logits: Gains, regimes: Counts, out: Gains, slots: Slots | None = None
    ) -> Gains:
        """Calibrated conditional survivals of drafts with confidence logits [R, d].

        regimes: [R] int64. out: [R, >= d] float32, written in the first d columns, returned.
        slots: rows and generations of the requests, for their own shifts; None: the average.
        A NaN or infinite logit has confidence 0, and nothing is learned from it.
        """
        _confidence(logits, regimes, self._shifts(slots), self._u, self._v, out)
        return out

    def lines(self, regimes: Counts, slots: Slots | None = None) -> tuple[Floats, Floats]:
        """Slopes u and shifts v [R, gamma]: `confidence` is sigmoid(u x + v) of a logit x.

        regimes: [R] int64. slots: as for `confidence`. For a device that computes it there.
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
        """Outcomes of a finished step: logits [R, d], the rest [R] int64, verified <= d.

        slots, confidence: as given to and by `confidence` in that step, [R, >= d]; both or none.
        Raises ValueError unless 0 <= accepted <= verified <= d.
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
        """Mean of outcome - c over recent drafts, [regimes, gamma]; few drafts say little."""
        return self._gap[..., 0] / np.maximum(self._gap[..., 1], FEW)

    def survival_error(self) -> float:
        """Expected calibration error of the survivals that steps were admitted by, ten bins.

        Over some 10,000 verified drafts of late; on few it is mostly noise. NaN before any.
        """
        count = self._bins[:, 1].sum()
        return float(np.abs(self._bins[:, 0]).sum() / count) if count > 0 else float("nan")

    @property
    def changes(self) -> int:
        """Return the changes of traffic that were detected, over all positions."""
        return int(self._changes.sum())

    def calibration(self, regime: int) -> tuple[Floats, Floats]:
        """Present temperatures and shifts, [gamma] each: c = sigmoid((logit + shift) / T)."""
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
    """Forget information beyond the floor, which keeps the equations solvable."""
    known[0] = floor + keep * (known[0] - floor)
    known[1] = keep * known[1]
    known[2] = floor + keep * (known[2] - floor)
