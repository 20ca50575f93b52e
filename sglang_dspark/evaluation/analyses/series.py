"""Compute tau along a series of drafters: by depth (paper, Fig. 3) or by length (Fig. 4a)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from sglang_dspark.evaluation.analyses import cells
from sglang_dspark.evaluation.analyses.analysis import Analysis, Result
from sglang_dspark.evaluation.analyses.cells import Table
from sglang_dspark.evaluation.analyses.traced import ByDomain, tau_draws
from sglang_dspark.evaluation.figure_parts import bars, colour_of, legend, marker_of, panels
from sglang_dspark.evaluation.resampling import estimate
from sglang_dspark.evaluation.traces import DrafterFacts, Trace, require_comparable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """tau by domain and in macro average of the drafter at x."""

    x: int
    drafter: DrafterFacts
    tau: ByDomain


@dataclass(frozen=True)
class SeriesResult(Result):
    """label -> points by ascending x. note: shown in the figure's title."""

    along: ClassVar[Literal["layers", "gamma"]]  # the drafter's fact on the x axis
    x_label: ClassVar[str]
    curves: Mapping[str, tuple[Point, ...]]
    note: str | None = None

    def remarks(self) -> list[str]:
        """Return the note, if any."""
        return [self.note] if self.note else []


@dataclass(frozen=True)
class DepthResult(SeriesResult):
    """tau against the number of drafter layers, one series for each kind of drafter."""

    analysis: ClassVar[str] = "depth"
    along = "layers"
    x_label = "drafter layers"


@dataclass(frozen=True)
class LengthResult(SeriesResult):
    """tau against the proposal length gamma, one series for each head."""

    analysis: ClassVar[str] = "length"
    along = "gamma"
    x_label = "proposal length gamma"


S = TypeVar("S", bound=SeriesResult)


def compute(result: type[S], series: Sequence[tuple[str, Trace]], note: str | None = None) -> S:
    """Compute tau along `result.along`; traces of one series share their label.

    Raises DSparkError if the traces have other prompts, targets or sampling.
    """
    require_comparable([trace for _, trace in series], [label for label, _ in series])
    curves: dict[str, list[Point]] = {}
    for label, trace in series:
        drawn = tau_draws({label: trace})[label]
        tau = {name: estimate(values) for name, values in drawn.items()}
        x: int = getattr(trace.drafter, result.along)
        curves.setdefault(label, []).append(Point(x, trace.drafter, tau))
    first = series[0][1]
    return result(
        first.target,
        dict(first.settings),
        {k: tuple(sorted(points, key=lambda point: point.x)) for k, points in curves.items()},
        note,
    )


def draw(result: SeriesResult) -> Figure:
    """Draw tau against x, one line per series: macro average first, then each domain."""
    curves = result.curves
    groups = list(next(iter(curves.values()))[0].tau)
    groups = [groups[-1], *groups[:-1]]
    figure, row = panels(len(groups))
    for axes, group in zip(row, groups, strict=True):
        for i, (label, points) in enumerate(curves.items()):
            x = [point.x for point in points]
            found = [point.tau[group] for point in points]
            axes.errorbar(
                x, [f.value for f in found], bars(found), fmt=marker_of(i) + "-",
                color=colour_of(i), label=label, ms=4, capsize=2, elinewidth=1,
            )  # fmt: skip
        axes.set_title(group)
        axes.set_xlabel(result.x_label)
        axes.set_xticks(sorted({p.x for points in curves.values() for p in points}))
    row[0].set_ylabel("tau")
    legend(figure, row[0])
    return figure


def page_tables(result: SeriesResult) -> list[Table]:
    """Tabulate one row for each point."""
    points = [(label, p) for label, line in result.curves.items() for p in line]
    groups = list(points[0][1].tau)
    rows = [
        [label, str(p.x), *(cells.interval(p.tau[group]) for group in groups)]
        for label, p in points
    ]
    return [Table(["drafter", result.along, *groups], rows)]


DEPTH = Analysis(DepthResult, "Accepted tokens a step by drafter depth", draw, page_tables)
LENGTH = Analysis(LengthResult, "Accepted tokens a step by proposal length", draw, page_tables)
