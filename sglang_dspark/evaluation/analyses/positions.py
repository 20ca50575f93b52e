"""Compute Fig. 2 of the paper: acceptance by draft position, by domain and overall."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sglang_dspark.evaluation.analyses import cells
from sglang_dspark.evaluation.analyses.analysis import Analysis
from sglang_dspark.evaluation.analyses.cells import Table
from sglang_dspark.evaluation.analyses.traced import OVERALL, TracedResult, origin
from sglang_dspark.evaluation.figure_parts import (
    bars,
    colour_of,
    legend,
    marker_of,
    new_figure,
    whole_numbers,
)
from sglang_dspark.evaluation.records import Step
from sglang_dspark.evaluation.resampling import MACRO, Estimate, Resampler, estimate
from sglang_dspark.evaluation.traces import Trace, require_comparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point(Estimate):
    """A chance, and the number of steps that it is taken over."""

    reached: int


Curves = Mapping[str, Mapping[str, tuple[Point, ...]]]  # label -> domain -> [gamma]


@dataclass(frozen=True)
class PositionsResult(TracedResult):
    """curves: chance that draft k is accepted given drafts 1..k-1; cumulative: of drafts 1..k."""

    analysis: ClassVar[str] = "positions"
    curves: Curves
    cumulative: Curves

    def parts(self) -> tuple[tuple[str, Curves], ...]:
        """Return both curves, each with its words for labels."""
        return ("given drafts 1..k-1", self.curves), ("drafts 1..k", self.cumulative)


def compute(traces: Mapping[str, Trace]) -> PositionsResult:
    """Compute both chances of each drafter. Raises DSparkError if the traces are not comparable."""
    require_comparable(list(traces.values()), list(traces))
    domains = next(iter(traces.values())).domains
    groups = {OVERALL: list(range(len(domains)))}
    for i, domain in enumerate(domains):
        groups.setdefault(domain, []).append(i)

    def by_group(of: Callable[[Trace], tuple[Point, ...]]) -> Curves:
        return {
            label: {name: of(trace.of_prompts(keep)) for name, keep in groups.items()}
            for label, trace in traces.items()
        }

    return PositionsResult(
        *origin(traces), curves=by_group(_conditional), cumulative=by_group(_cumulative)
    )


def _conditional(trace: Trace) -> tuple[Point, ...]:
    """Compute position-wise conditional acceptance of one trace, all prompts in one group."""
    return _by_position(trace, lambda step, k: step.accepted >= k - 1)


def _cumulative(trace: Trace) -> tuple[Point, ...]:
    """Compute the chance that drafts 1..k are accepted, all prompts in one group."""
    return _by_position(trace, lambda _step, _k: True)


def _by_position(trace: Trace, counts: Callable[[Step, int], bool]) -> tuple[Point, ...]:
    """Return the share of verified drafts k selected by `counts` whose step accepted k or more."""
    resampler = Resampler(["all"] * len(trace.prompts))
    result = []
    for k in range(1, trace.gamma + 1):
        reached, accepted = np.zeros(len(trace.prompts)), np.zeros(len(trace.prompts))
        for i, generation in enumerate(trace.generations):
            for step in generation.steps:
                if step.verify_len >= k and counts(step, k):
                    reached[i] += 1
                    accepted[i] += step.accepted >= k
        found = estimate(resampler.ratios(accepted, reached)[MACRO])
        result.append(Point(found.value, found.low, found.high, int(reached.sum())))
    return tuple(result)


def draw(result: PositionsResult) -> Figure:
    """Draw conditional acceptance above, cumulative below, a column for each domain."""
    groups = list(next(iter(result.curves.values())))
    groups = groups if len(groups) > 2 else groups[1:]  # overall is the same as a single domain
    figure = new_figure(2.5 * len(groups) + 0.5, 5.2)
    grid = figure.subplots(2, len(groups), sharex=True, sharey=True, squeeze=False)
    for row, (name, curves) in zip(grid, result.parts(), strict=True):
        for axes, group in zip(row, groups, strict=True):
            for i, (label, parts) in enumerate(curves.items()):
                _line(axes, parts[group], i, label)
            axes.set_ylim(0, 1)
            whole_numbers(axes)
        row[0].set_ylabel(f"accepted, {name}")
    for axes, group in zip(grid[0], groups, strict=True):
        axes.set_title(group)
    for axes in grid[1]:
        axes.set_xlabel("draft position k")
    legend(figure, grid[0][0])
    return figure


def _line(axes: Axes, points: Sequence[Point], i: int, label: str) -> None:
    k = np.arange(1, len(points) + 1)
    value, spread = np.array([point.value for point in points]), bars(points)
    axes.plot(k, value, marker_of(i) + "-", color=colour_of(i), label=label, ms=4)
    axes.fill_between(k, value - spread[0], value + spread[1], color=colour_of(i), alpha=0.15, lw=0)


def page_tables(result: PositionsResult) -> list[Table]:
    """Tabulate each chance, with a column for each position."""
    found = []
    for name, curves in result.parts():
        rows = [
            [label, group, *(cells.percent(point.value) for point in points)]
            for label, parts in curves.items()
            for group, points in parts.items()
        ]
        width = max(len(row) for row in rows) - 2
        padded = [[*row, *[""] * (width + 2 - len(row))] for row in rows]
        head = [f"accepted, {name}", "domain", *(f"k = {k + 1}" for k in range(width))]
        found.append(Table(head, padded))
    return found


ANALYSIS = Analysis(
    PositionsResult,
    "Acceptance of draft k given drafts 1..k-1, and of drafts 1..k",
    draw,
    page_tables,
)
