"""Compare all cells of a sweep: levels with intervals, paired ratios, frontiers, SLAs, a verdict.

Void cells never enter. A comparison at a load uses the trials in which both arms have a valid cell
there; the one at matched throughput needs complete trials and reports the skipped ones. No sentence
names a winner if the interval contains 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.intervals import MIN_TRIALS, Ratio, paired_ratio
from sglang_dspark.loadtest.client.measure import listed_failures
from sglang_dspark.loadtest.sweep.bursts import bursts
from sglang_dspark.loadtest.sweep.config import SlaLimits, SweepConfig
from sglang_dspark.loadtest.sweep.frontier import Matched, Point, compare_matched, frontier
from sglang_dspark.loadtest.sweep.holding import held
from sglang_dspark.loadtest.sweep.run_dir import (
    Cell,
    Compared,
    Interval,
    Level,
    Loop,
    MatchedLevel,
    MatchedSummary,
    SlaCapacity,
    SlaSummary,
    Summary,
    known,
)
from sglang_dspark.loadtest.sweep.sla import Sla, capacity
from sglang_dspark.loadtest.sweep.verdict import verdict

_WHAT = {"tokens_per_s": "throughput", "speed_p50": "speed per user"}


@dataclass(frozen=True)
class Cells:
    """Valid cells by place."""

    by_place: dict[tuple[str, Loop, float, int], Cell]

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Cells:
        """Select the cells that may be compared."""
        good = [c for c in cells if not c.void and c.tokens_per_s]
        return cls({(c.arm, c.loop, c.level, c.trial): c for c in good})

    def with_speed(self) -> Cells:
        """Select the cells with a speed per user, which answers of one chunk lack."""
        return Cells({place: cell for place, cell in self.by_place.items() if cell.speed.p50})

    def at(self, arm: str, loop: Loop, level: float) -> dict[int, Cell]:
        """Return the cells of one arm at one load, by trial."""
        return {
            trial: cell
            for (name, way, place, trial), cell in sorted(self.by_place.items())
            if (name, way, place) == (arm, loop, level)
        }

    def levels(self, arm: str, loop: Loop) -> list[float]:
        """Return the loads at which the arm has a valid cell, ascending."""
        return sorted({k[2] for k in self.by_place if k[:2] == (arm, loop)})


def summarise(config: SweepConfig, cells: Sequence[Cell], planned: int) -> Summary:
    """Summarise a sweep. planned: number of cells that the sweep has to measure."""
    good = Cells.of(cells)
    matched = [matched_summary(good, *pair) for pair in _pairs(config)]
    return Summary(
        label=config.label,
        verdict=_verdict(config, matched),
        levels=_levels(cells, good),
        ratios=_ratios(config, good),
        matched=matched,
        slas=[_sla(config, good, limits) for limits in config.slas],
        hold=None if config.hold is None else held(config, cells),
        bursts=bursts(config.names, list(good.by_place.values())),
        notes=[*_notes(cells, planned), *_warnings(cells), *_repeats(config, cells)],
    )


def compared(
    good: Cells, over: str, under: str, what: str, loop: Loop, level: float
) -> Compared | None:
    """Compute the paired ratio at one load; None if no trial has both arms."""
    good = good.with_speed() if what == "speed_p50" else good
    ours, theirs = good.at(over, loop, level), good.at(under, loop, level)
    trials = sorted(ours.keys() & theirs.keys())
    if not trials:
        return None
    ratio = paired_ratio(
        [_value(ours[t], what) for t in trials], [_value(theirs[t], what) for t in trials]
    )
    return Compared(
        over=over,
        under=under,
        what=what,
        loop=loop,
        level=level,
        low=known(ratio.low) if ratio.low > 0 else None,
        mid=ratio.mid,
        high=known(ratio.high),
        trials=ratio.trials,
        method=ratio.method,
        winner={"over": over, "under": under}.get(ratio.winner, ""),
        said=verdict(over, under, f"{_WHAT[what]} at {_load(loop, level)}", ratio),
    )


def matched_summary(good: Cells, over: str, under: str) -> MatchedSummary:
    """Compare speed per user at equal total throughput, closed loop (paper, Figure 7)."""
    good = good.with_speed()
    trials, levels, left_out = _comparable(good, over, under)
    if not trials or not levels[under] or not levels[over]:
        return _no_match(over, under, [*left_out, "no load has valid cells of both arms"])
    found = compare_matched(
        [_points(good, over, levels[over], trial) for trial in trials],
        [_points(good, under, levels[under], trial) for trial in trials],
    )
    left_out += found.left_out
    overall = found.overall
    if overall is None:
        return _no_match(over, under, left_out)
    said = verdict(over, under, "speed per user at matched throughput", overall)
    of = len(good.levels(under, "closed"))
    if len(found.levels) < of:
        said += f" {len(found.levels)} of {of} loads of {under} could be matched."
    return MatchedSummary(
        over=over,
        under=under,
        levels=[_matched_level(each) for each in found.levels],
        low=_low(overall),
        mid=overall.mid,
        high=known(overall.high),
        trials=overall.trials,
        left_out=left_out,
        said=said,
    )


def _matched_level(matched: Matched) -> MatchedLevel:
    return MatchedLevel(
        level=matched.load,
        tokens_per_s=matched.throughput,
        low=_low(matched.ratio),
        mid=matched.ratio.mid,
        high=known(matched.ratio.high),
    )


def _comparable(
    good: Cells, over: str, under: str
) -> tuple[list[int], dict[str, list[float]], list[str]]:
    """Select trials and loads for which each arm has every cell, with a line for each skip.

    Skip incomplete trials while enough others remain, else the loads that are not in all of them.
    """
    arms = (over, under)
    levels = {arm: good.levels(arm, "closed") for arm in arms}
    has = {
        arm: {level: set(good.at(arm, "closed", level)) for level in levels[arm]} for arm in arms
    }
    anywhere = set.intersection(*(set().union(*has[arm].values()) for arm in arms))
    whole = anywhere.intersection(*(seen for arm in arms for seen in has[arm].values()))
    if len(whole) >= MIN_TRIALS:
        said = [f"trial {t + 1}: a cell is missing or void" for t in sorted(anywhere - whole)]
        return sorted(whole), levels, said
    kept = {arm: [lv for lv in levels[arm] if has[arm][lv] >= anywhere] for arm in arms}
    said = [
        f"load {level:g} of {arm}: not valid in every trial"
        for arm in arms
        for level in levels[arm]
        if level not in kept[arm]
    ]
    return sorted(anywhere), kept, said


def _no_match(over: str, under: str, left_out: list[str]) -> MatchedSummary:
    return MatchedSummary(
        over=over,
        under=under,
        levels=[],
        low=None,
        mid=None,
        high=None,
        trials=0,
        left_out=left_out,
        said=f"No winner between {over} and {under}: nothing could be compared at matched "
        "throughput.",
    )


def _pairs(config: SweepConfig) -> list[tuple[str, str]]:
    """List the pairs: the configured one, its `over` with every arm, each arm with the baseline."""
    pairs: list[tuple[str, str]] = []
    if config.compare is not None:
        ours = config.compare.over
        pairs = [(ours, config.compare.under), *((ours, name) for name in config.names)]
    pairs += [(name, config.baseline) for name in config.names]
    return [(over, under) for over, under in dict.fromkeys(pairs) if over != under]


def _verdict(config: SweepConfig, matched: Sequence[MatchedSummary]) -> str:
    if not matched:
        return "One arm was measured: there is nothing to compare it with."
    return f"{config.label}: {matched[0].said}" if config.label else matched[0].said


def _ratios(config: SweepConfig, good: Cells) -> list[Compared]:
    loops: tuple[Loop, ...] = ("closed", "open")
    found = [
        compared(good, over, under, what, loop, level)
        for over, under in _pairs(config)
        for loop in loops
        for level in good.levels(over, loop)
        for what in _WHAT
    ]
    return [each for each in found if each is not None]


def _levels(cells: Sequence[Cell], good: Cells) -> list[Level]:
    places = dict.fromkeys((cell.arm, cell.loop, cell.level) for cell in cells)
    best = {
        (arm, loop): {point.load for point in frontier(_mean_points(good, arm, loop))}
        for arm, loop, _ in places
    }
    rows = []
    for arm, loop, level in sorted(places):
        own = list(good.at(arm, loop, level).values())
        all_cells = [c for c in cells if (c.arm, c.loop, c.level) == (arm, loop, level)]
        rows.append(
            Level(
                arm=arm,
                loop=loop,
                level=level,
                trials=len(own),
                void=len(all_cells) - len(own),
                tokens_per_s=_interval([_value(c, "tokens_per_s") for c in own]),
                speed_p50=_interval([v for c in own if (v := c.speed.p50) is not None]),
                speed_p10=_interval([v for c in own if (v := c.speed.p10) is not None]),
                ttft_p50=_mean([c.ttft.p50 for c in own]),
                ttft_p95=_mean([c.ttft.p95 for c in own]),
                tpot_p50=_mean([c.tpot.p50 for c in own]),
                tau=_mean([c.tau for c in own]),
                verify_length=_mean([c.verify_length for c in own]),
                on_frontier=level in best[arm, loop],
            )
        )
    return rows


def _sla(config: SweepConfig, good: Cells, limits: SlaLimits) -> SlaSummary:
    return SlaSummary(
        speed_p50=limits.speed_p50,
        speed_p10=limits.speed_p10,
        ttft_p95=limits.ttft_p95,
        arms=[
            _capacity(name, _mean_points(good, name, "closed"), limits.sla())
            for name in config.names
        ],
    )


def _capacity(arm: str, points: Sequence[Point], sla: Sla) -> SlaCapacity:
    if not points:
        return SlaCapacity(
            arm=arm,
            kind="unknown",
            tokens_per_s=0.0,
            load=0.0,
            bracket=(None, None),
            why="no valid cell",
        )
    found = capacity(points, sla)
    return SlaCapacity(
        arm=arm,
        kind=found.kind,
        tokens_per_s=found.throughput,
        load=found.load,
        bracket=found.bracket,
        why=found.why,
    )


def mean_points(cells: Sequence[Cell], arm: str) -> list[Point]:
    """Return the arm's closed-loop points, means over the trials that count, by ascending load."""
    return _mean_points(Cells.of(cells), arm, "closed")


def _mean_points(good: Cells, arm: str, loop: Loop) -> list[Point]:
    points, good = [], good.with_speed()
    for level in good.levels(arm, loop):
        own = [_point(cell) for cell in good.at(arm, loop, level).values()]
        means = np.mean([[p.throughput, p.speed_p50, p.speed_p10, p.ttft_p95] for p in own], axis=0)
        points.append(Point(level, *means.tolist()))
    return points


def _points(good: Cells, arm: str, levels: Sequence[float], trial: int) -> list[Point]:
    return [_point(good.by_place[arm, "closed", level, trial]) for level in levels]


def _point(cell: Cell) -> Point:
    ttft = cell.ttft.p95
    return Point(
        cell.level,
        _value(cell, "tokens_per_s"),
        _value(cell, "speed_p50"),
        cell.speed.p10 or 0.0,
        math.nan if ttft is None else ttft,
    )


def _value(cell: Cell, what: str) -> float:
    value = cell.tokens_per_s if what == "tokens_per_s" else cell.speed.p50
    if value is None:
        raise DSparkError(f"cell {cell.name} has no {_WHAT[what]}")
    return value


def _interval(values: Sequence[float]) -> Interval | None:
    if not values or min(values) <= 0:
        return None
    ratio = paired_ratio(values, [1.0] * len(values))
    return Interval(low=_low(ratio), mid=ratio.mid, high=known(ratio.high), values=list(values))


def _low(ratio: Ratio) -> float | None:
    return ratio.low if ratio.low > 0 else None


def _mean(values: Sequence[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return sum(given) / len(given) if given else None


def _notes(cells: Sequence[Cell], planned: int) -> list[str]:
    notes = []
    if len(cells) < planned:
        notes.append(f"{planned - len(cells)} of {planned} cells were not measured")
    for cell in cells:
        if cell.void:
            notes.append(f"{cell.name} is void: {cell.void}")
        elif cell.failures:
            listed = listed_failures(cell.failures, cell.errors)
            notes.append(f"{cell.name}: of {cell.requests} requests {listed}")
        notes += [f"{cell.name}: {line}" for line in cell.disagreements]
    return notes


def _warnings(cells: Sequence[Cell]) -> list[str]:
    """Return a line for each arm and kind of warning, in the words of its first cell."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        for kind in cell.warnings:
            found.setdefault((cell.arm, kind), []).append(cell)
    counts = Counter(cell.arm for cell in cells)
    return [
        f"{own[0].name}: {own[0].warnings[kind]} (so in {len(own)} of {counts[arm]} cells of {arm})"
        for (arm, kind), own in sorted(found.items())
    ]


def _repeats(config: SweepConfig, cells: Sequence[Cell]) -> list[str]:
    """Return a line for each load that sends a whole prompt twice, unless that is wanted."""
    if config.repeats == "wanted":
        return []
    worst: dict[tuple[Loop, float], Cell] = {}
    for cell in cells:
        place = (cell.loop, cell.level)
        if cell.repeats > (worst[place].repeats if place in worst else 0):
            worst[place] = cell
    return [
        f"{_load(*place)}: {worst[place].repeats} of {worst[place].requests} requests of a cell "
        "repeat a whole prompt of it, which prefix caches and drafts that remember make easy; give "
        "a mix of more prompts, or write `repeats: wanted`"
        for place in sorted(worst)
    ]


def _load(loop: Loop, level: float) -> str:
    if loop == "open":
        return f"{level:g} requests/s"
    return "1 user" if level == 1 else f"{level:g} users"
