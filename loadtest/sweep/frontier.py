"""Throughput against speed per user: comparison at matched throughput, and under an SLA.

An arm is measured at several loads (users of a closed loop, or requests/s). Its frontier is the
points that no other point beats in both throughput and speed per user, and is linear between them.
It is never extended to more throughput than was measured. To less it is level, because an arm that
delivers more at some speed can deliver less at that speed. Matched throughput is the paper's
comparison (Figure 7): the users' speed at which both arms deliver the same tokens/s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.intervals import Ratio, paired_ratio
from sglang_dspark.loadtest.client.measure import Measurement


@dataclass(frozen=True)
class Point:
    """One measured cell. load: users or requests/s; throughput: tokens/s; speed: tokens/s/user."""

    load: float
    throughput: float
    speed_p50: float
    speed_p10: float
    ttft_p95: float

    @classmethod
    def of(cls, load: float, cell: Measurement) -> Point:
        """Convert a cell's figures. Raises DSparkError for a void cell: it must not be compared."""
        if cell.void:
            raise DSparkError(f"the cell at load {load:g} does not count: {cell.void}")
        speed = cell.user_speed
        return cls(load, cell.tokens_per_s, speed.p50, speed.p10, cell.ttft.p95)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return points unbeaten in throughput and median speed, by ascending throughput."""
    best: list[Point] = []
    fastest = -math.inf
    for point in sorted(points, key=lambda p: (p.throughput, p.speed_p50), reverse=True):
        if point.speed_p50 > fastest:
            best.append(point)
            fastest = point.speed_p50
    return best[::-1]


def speed_at(points: Sequence[Point], throughput: float) -> float | None:
    """Return the median speed per user at `throughput` or more; None if it was never reached."""
    best = frontier(points)
    if not best or throughput > best[-1].throughput:
        return None
    return float(np.interp(throughput, [p.throughput for p in best], [p.speed_p50 for p in best]))


@dataclass(frozen=True)
class Matched:
    """Speed per user over the other arm's, at the throughput of that arm at `load`.

    throughput: its mean over the trials, tokens/s.
    """

    load: float
    throughput: float
    ratio: Ratio


@dataclass(frozen=True)
class MatchedComparison:
    """levels: by load of the other arm; overall: their geometric mean, None without a level;
    left_out: loads without a comparison, with the reason."""

    levels: tuple[Matched, ...]
    overall: Ratio | None
    left_out: tuple[str, ...]


def compare_matched(
    ours: Sequence[Sequence[Point]], theirs: Sequence[Sequence[Point]]
) -> MatchedComparison:
    """Compare our speed per user with theirs at each throughput that theirs was measured at.

    ours, theirs: for each trial the points at all loads; trials are paired. Raises DSparkError
    if the arms' trials, or the loads of their trials, do not match.
    """
    if len(ours) != len(theirs) or not ours:
        raise DSparkError(f"arms need the same trials: {len(ours)} against {len(theirs)}")
    levels: list[Matched] = []
    left_out: list[str] = []
    speeds: list[list[list[float]]] = []  # [levels, 2, trials]
    columns = _by_load(theirs)
    useful = {point.load for point in frontier([_mean(column) for column in columns])}
    for column in columns:
        mean = _mean(column)
        said = f"load {mean.load:g} ({mean.throughput:.1f} tokens/s)"
        reached = [speed_at(a, b.throughput) for a, b in zip(ours, column, strict=True)]
        known = [speed for speed in reached if speed is not None]
        if mean.load not in useful:
            left_out.append(f"{said}: the other arm is overloaded; another load of it is better")
        elif len(known) < len(reached):
            left_out.append(f"{said}: more than was measured of ours in every trial")
        else:
            own = [point.speed_p50 for point in column]
            speeds.append([known, own])
            levels.append(Matched(mean.load, mean.throughput, paired_ratio(known, own)))
    if not levels:
        return MatchedComparison((), None, tuple(left_out))
    means = np.exp(np.log(np.array(speeds)).mean(axis=0))  # [2, trials]
    overall = paired_ratio(means[0].tolist(), means[1].tolist())
    return MatchedComparison(tuple(levels), overall, tuple(left_out))


def _by_load(trials: Sequence[Sequence[Point]]) -> list[tuple[Point, ...]]:
    """Group points by load: [loads] of [trials]. Raises DSparkError if the trials' loads differ."""
    table = [sorted(trial, key=lambda point: point.load) for trial in trials]
    if any([p.load for p in row] != [p.load for p in table[0]] for row in table):
        raise DSparkError("the trials of an arm were measured at different loads")
    return list(zip(*table, strict=True))


def _mean(points: Sequence[Point]) -> Point:
    """Return the mean point of the trials at one load."""
    values = np.mean([[p.throughput, p.speed_p50, p.speed_p10, p.ttft_p95] for p in points], axis=0)
    throughput, p50, p10, ttft = values.tolist()
    return Point(points[0].load, throughput, p50, p10, ttft)
