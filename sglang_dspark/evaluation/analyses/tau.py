"""Compute Table 1 of the paper: tau by domain and drafter, the first one's ratio to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sglang_dspark.evaluation.analyses import cells
from sglang_dspark.evaluation.analyses.analysis import Analysis
from sglang_dspark.evaluation.analyses.cells import Table
from sglang_dspark.evaluation.analyses.traced import ByDomain, TracedResult, origin, tau_draws
from sglang_dspark.evaluation.figure_parts import (
    COLOURS,
    GREY,
    bars,
    colour_of,
    legend,
    marker_of,
    panels,
)
from sglang_dspark.evaluation.resampling import MACRO, Estimate, Number, estimate
from sglang_dspark.evaluation.traces import Trace, require_comparable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True)
class TauResult(TracedResult):
    """label -> domain or macro -> tau, its interval (low, high); `FIRST/OTHER` -> paired ratio."""

    analysis: ClassVar[str] = "tau"
    tau: Mapping[str, Mapping[str, Number]]
    interval: Mapping[str, Mapping[str, tuple[Number, Number]]]
    ratio: Mapping[str, ByDomain]

    @property
    def groups(self) -> list[str]:
        """List the domains, then macro."""
        return list(next(iter(self.tau.values())))

    def estimates(self, label: str) -> dict[str, Estimate]:
        """Return tau of a drafter with its interval, by group."""
        bounds = self.interval[label]
        return {name: Estimate(tau, *bounds[name]) for name, tau in self.tau[label].items()}


def compute(traces: Mapping[str, Trace]) -> TauResult:
    """Compute tau of each drafter, on the same draws for all.

    Raises DSparkError if the traces have other prompts, targets or sampling.
    """
    labels = list(traces)
    require_comparable(list(traces.values()), labels)
    drawn = tau_draws(traces)
    ratios = {}
    for other in labels[1:]:
        pairs = {name: drawn[labels[0]][name] / drawn[other][name] for name in drawn[other]}
        ratios[f"{labels[0]}/{other}"] = {name: estimate(draws) for name, draws in pairs.items()}
    known = {k: {name: estimate(draws) for name, draws in v.items()} for k, v in drawn.items()}
    return TauResult(
        *origin(traces),
        tau={k: {name: found.value for name, found in v.items()} for k, v in known.items()},
        interval={
            k: {n: (found.low, found.high) for n, found in v.items()} for k, v in known.items()
        },
        ratio=ratios,
    )


def draw(result: TauResult) -> Figure:
    """Draw bars by domain, one of each drafter; with as many drafters as colours, a row each."""
    if len(result.tau) >= len(COLOURS):
        return _draw_rows(result)
    labels, groups = list(result.tau), result.groups
    across = max(1.1 + 0.36 * len(labels) * len(groups), 6.4)  # the least width for the caption
    figure, (axes,) = panels(1, width=across, height=3.3)
    width = 0.82 / len(labels)
    for i, label in enumerate(labels):
        place = np.arange(len(groups)) + (i - (len(labels) - 1) / 2) * width
        value = np.array([result.tau[label][group] for group in groups])
        bounds = np.array([result.interval[label][group] for group in groups])
        error = np.stack([value - bounds[:, 0], bounds[:, 1] - value])
        axes.bar(
            place, value, width * 0.94, color=colour_of(i), label=label, yerr=error,
            error_kw={"elinewidth": 1, "ecolor": "#333333", "capsize": 2},
        )  # fmt: skip
        for x, y, top in zip(place, value, bounds[:, 1], strict=True):
            axes.annotate(
                f"{y:.2f}", (x, top), (0, 2), textcoords="offset points", ha="center", fontsize=7
            )
    axes.set_xticks(np.arange(len(groups)), groups)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("tau")
    axes.axhline(1, color=GREY, lw=1)
    legend(figure, axes)
    return figure


def _draw_rows(result: TauResult) -> Figure:
    """Draw how much each other drafter's tau exceeds the first one's, macro average."""
    first, *others = result.tau
    over = [_inverse(result.ratio[f"{first}/{each}"][MACRO]) for each in others]
    more = [Estimate(*(100 * (part - 1) for part in astuple(each))) for each in over]
    figure, (axes,) = panels(1, width=6.4, height=1.2 + 0.2 * len(others))
    place = np.arange(len(others))
    axes.errorbar(
        [each.value for each in more], place, xerr=bars(more), fmt=marker_of(0),
        color=colour_of(0), ms=5, capsize=3, elinewidth=1,
    )  # fmt: skip
    axes.axvline(0, color=GREY, lw=1)
    axes.set_yticks(place, others)
    axes.invert_yaxis()
    axes.set_xlabel(f"tau over {first}'s {result.tau[first][MACRO]:.3f}, macro, %")
    return figure


def _inverse(ratio: Estimate) -> Estimate:
    return Estimate(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)


def page_tables(result: TauResult) -> list[Table]:
    """Tabulate tau, and the ratios if there is more than one drafter."""
    groups = result.groups
    found = [Table(["tau", *groups], _tau_rows(result))]
    if result.ratio:
        found.append(Table(["ratio of tau - 1, paired", *groups], _ratio_rows(result)))
    return found


def table(result: TauResult) -> list[RenderableType]:
    """Show tau and ratios in one table."""
    from rich.table import Table as Shown

    shown = Shown(title="tau, tokens per verify step with the bonus (95% over prompts)")
    for name in ("drafter", *result.groups):
        shown.add_column(name, justify="left" if name == "drafter" else "right")
    for row in (*_tau_rows(result), *_ratio_rows(result)):
        shown.add_row(*row)
    return [shown]


def _tau_rows(result: TauResult) -> list[list[str]]:
    return [
        [label, *(cells.interval(found) for found in result.estimates(label).values())]
        for label in result.tau
    ]


def _ratio_rows(result: TauResult) -> list[list[str]]:
    groups = result.groups
    return [
        [pair, *(cells.gain(ratios[group]) for group in groups)]
        for pair, ratios in result.ratio.items()
    ]


def _summary(result: TauResult) -> dict[str, Any]:
    found = result.to_json()
    return {name: found[name] for name in ("tau", "interval", "ratio")}


ANALYSIS = Analysis(
    TauResult,
    "Accepted tokens a step, 95% over prompts",
    draw,
    page_tables,
    table,
    _summary,
)
