"""Find the highest throughput that holds a service level, from measured points.

A level is a floor under the speed per user (median, slowest tenth) and a ceiling on the time to
first token (p95). Speed can only drop and waiting only grow with load, so each criterion is fitted
monotonically over load before it is judged; the first limit to be crossed gives the capacity.
The capacity is interpolated only if the criterion changes gradually; at a cliff it is that of the
last load that held. "at least" or "infeasible": the crossing is outside of the measured loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.sweep.frontier import Point

Floats = NDArray[np.float64]
Kind = Literal["bracketed", "cliff", "at least", "infeasible"]
_CLIFF = 2.0  # a criterion worsens by more than this times the growth of the load


@dataclass(frozen=True)
class Sla:
    """Speeds in tokens/s/user, TTFT in s; None disables a criterion."""

    speed_p50: float | None = None
    speed_p10: float | None = None
    ttft_p95: float | None = None

    def __post_init__(self) -> None:
        limits = [self.speed_p50, self.speed_p10, self.ttft_p95]
        given = [limit for limit in limits if limit is not None]
        if not given:
            raise DSparkError("an SLA needs a speed floor or a TTFT ceiling")
        if not all(np.isfinite(limit) and limit > 0 for limit in given):
            raise DSparkError(f"SLA limits must be above 0, got {given}")
        if self.speed_p50 is not None and (self.speed_p10 or 0.0) > self.speed_p50:
            raise DSparkError("the SLA's p10 floor is above its p50 floor: the latter is idle")


@dataclass(frozen=True)
class Capacity:
    """throughput: tokens/s at `load`, 0 if infeasible; why: its limit, in words.

    bracket: highest load that held and lowest that did not, None where not measured.
    """

    kind: Kind
    throughput: float
    load: float
    bracket: tuple[float | None, float | None]
    why: str


def capacity(points: Sequence[Point], sla: Sla) -> Capacity:
    """Compute the highest throughput that holds the SLA. points: one per load, at least one."""
    ordered = _ordered(points)
    loads = np.array([point.load for point in ordered], dtype=np.float64)
    fits = _headroom(ordered, sla)
    worst = np.min([*fits.values()], axis=0)  # [loads]: 1 and above holds
    holding = int((worst >= 1).sum())  # monotone: those that hold are first
    delivered = _best_so_far(ordered)
    if holding == 0:
        name = min(fits, key=lambda key: fits[key][0])
        why = f"{name} is missed by a factor of {1 / worst[0]:.2f} at the lowest load {loads[0]:g}"
        return Capacity("infeasible", 0.0, 0.0, (None, float(loads[0])), why)
    inside = float(loads[holding - 1])
    if holding == len(loads):
        why = f"it still holds at the highest load measured, {inside:g}"
        return Capacity("at least", float(delivered[-1]), inside, (inside, None), why)
    outside = float(loads[holding])
    bracket = (inside, outside)
    name = min(fits, key=lambda key: fits[key][holding])
    before, after = worst[holding - 1], worst[holding]
    if before / after > _CLIFF * outside / inside:
        why = f"{name} breaks down {before / after:.1f}-fold from load {inside:g} to {outside:g}"
        return Capacity("cliff", float(delivered[holding - 1]), inside, bracket, why)
    # 1 / headroom (time per token, TTFT) grows about linearly with load.
    share = (1 - 1 / before) / (1 / after - 1 / before)
    load = inside + share * (outside - inside)
    throughput = float(np.interp(load, loads, delivered))
    return Capacity("bracketed", throughput, load, bracket, f"{name} is what limits it")


def next_load(
    points: Sequence[Point], sla: Sla, *, whole: bool = True, tolerance: float = 0.05
) -> float | None:
    """Return the load to measure next, or None if the bracket is narrow enough.

    Doubles or halves until the crossing is bracketed, then returns the bracket's geometric middle.
    whole: loads are numbers of users. tolerance: relative width at which the search ends.
    """
    held, missed = capacity(points, sla).bracket
    if missed is None and held is not None:
        return 2 * held
    if held is None and missed is not None:
        below = missed / 2
        if whole:
            return max(1.0, float(int(below))) if missed > 1 else None
        return below
    assert held is not None and missed is not None  # noqa: PT018 - one of them always is known
    if missed / held <= 1 + tolerance or (whole and missed - held <= 1):
        return None
    middle = float(np.sqrt(held * missed))
    return float(min(max(round(middle), held + 1), missed - 1)) if whole else middle


def _ordered(points: Sequence[Point]) -> list[Point]:
    ordered = sorted(points, key=lambda point: point.load)
    if not ordered:
        raise DSparkError("no cell was measured: there is nothing to judge the SLA by")
    if any(a.load == b.load for a, b in pairwise(ordered)) or ordered[0].load <= 0:
        raise DSparkError("the SLA search takes one point per load, loads above 0")
    return ordered


def _headroom(ordered: Sequence[Point], sla: Sla) -> dict[str, Floats]:
    """Fit each criterion, 1 at its limit and better above: [loads], non-increasing (isotonic)."""
    raw: dict[str, list[float]] = {}
    if sla.speed_p50 is not None:
        raw["speed at p50"] = [point.speed_p50 / sla.speed_p50 for point in ordered]
    if sla.speed_p10 is not None:
        raw["speed at p10"] = [point.speed_p10 / sla.speed_p10 for point in ordered]
    if sla.ttft_p95 is not None:
        raw["TTFT at p95"] = [sla.ttft_p95 / max(point.ttft_p95, 1e-9) for point in ordered]
    for name, values in raw.items():
        if not np.isfinite(values).all():
            raise DSparkError(f"{name} is unknown at some load; leave void cells out")
    return {name: _falling(values) for name, values in raw.items()}


def _best_so_far(ordered: Sequence[Point]) -> Floats:
    """Compute the best throughput at each load or below, which an operator may choose: [loads]."""
    return np.maximum.accumulate([point.throughput for point in ordered])


def _falling(values: Sequence[float]) -> Floats:
    """Fit non-increasing values by least squares: [n] (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # (mean, how many)
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] < mean:
            before, size = pools.pop()
            mean, count = (mean * count + before * size) / (count + size), count + size
        pools.append((mean, count))
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools])
