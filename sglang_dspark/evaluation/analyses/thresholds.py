"""Compute Fig. 5 of the paper: acceptance rate and tau if drafts are admitted above a threshold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses import cells
from sglang_dspark.evaluation.analyses.analysis import Analysis
from sglang_dspark.evaluation.analyses.cells import Table
from sglang_dspark.evaluation.analyses.traced import OVERALL, TracedResult, origin, step_groups
from sglang_dspark.evaluation.calibration_data import observations
from sglang_dspark.evaluation.figure_parts import COLOURS, bars, legend, new_figure
from sglang_dspark.evaluation.resampling import (
    MACRO,
    Estimate,
    Floats,
    Number,
    Resampler,
    estimate,
)
from sglang_dspark.evaluation.traces import Trace
from sglang_dspark.schedule.calibration import Calibration, Observations, apply_numpy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rule = Literal["survival", "conditional"]


@dataclass(frozen=True)
class Curve:
    """Estimates by threshold, [points] each, over `steps` verify steps.

    admitted_share: admitted drafts of all drafts.
    """

    acceptance_rate: tuple[Estimate, ...]
    tau: tuple[Estimate, ...]
    admitted_share: tuple[Number, ...]
    steps: int


@dataclass(frozen=True)
class ThresholdsResult(TracedResult):
    """label -> domain or overall -> curve over `thresholds`; `calibrated` are labels."""

    analysis: ClassVar[str] = "thresholds"
    rule: Rule
    calibrated: tuple[str, ...]
    thresholds: tuple[float, ...]
    curves: Mapping[str, Mapping[str, Curve]]


def compute(
    traces: Mapping[str, Trace],
    *,
    calibrations: Mapping[str, Calibration] | None = None,
    rule: Rule = "survival",
    points: int = 50,
) -> ThresholdsResult:
    """Compute curves over `points` thresholds in [0, 1).

    rule "survival" admits draft k while a_k > t, "conditional" while c_k > t. calibrations:
    for some of the labels. Admission shortens a chain and cannot change which drafts before
    the cut are accepted, so a trace that verified everything shows exactly how many tokens each of
    its steps would have yielded. The later anchors that a shorter window moves are not simulated.
    Raises DSparkError for a trace with shortened windows or without a confidence.
    """
    grid = np.linspace(0.0, 1.0, points, endpoint=False)
    curves = {}
    for label, trace in traces.items():
        if not trace.has_confidence():
            raise DSparkError(f"{label}: the drafter has no confidence to show")
        data = observations(trace.generations, trace.gamma)
        if (data.verified < trace.gamma).any():
            raise DSparkError(f"{label}: the trace has shortened verify windows; record it in full")
        table = (calibrations or {}).get(label, Calibration.identity(trace.gamma))
        admitted = _admitted(data, table, rule, grid)  # [points, N]
        curves[label] = {
            name: _curve(data, admitted, keep, len(trace.prompts))
            for name, keep in step_groups(trace, data).items()
        }
    return ThresholdsResult(
        *origin(traces),
        rule=rule,
        calibrated=tuple(sorted(calibrations or {})),
        thresholds=tuple(grid.tolist()),
        curves=curves,
    )


def _admitted(data: Observations, table: Calibration, rule: Rule, grid: Floats) -> Floats:
    """Count the drafts admitted in each step at each threshold: [points, N]."""
    value = apply_numpy(data.logits, table)  # [N, gamma]
    if rule == "conditional":
        scaled = (data.logits + table.shift) / np.array(table.temperatures)
        value = np.minimum.accumulate(np.exp(-np.logaddexp(0.0, -scaled)), axis=1)
    return (value[None] > grid[:, None, None]).sum(axis=2).astype(np.float64)


def _curve(data: Observations, admitted: Floats, keep: NDArray[np.bool_], prompts: int) -> Curve:
    """Compute curves over the grid for the steps `keep` [N], with intervals over prompts."""
    owner = data.request[keep]
    present = np.unique(owner)
    resampler = Resampler(["all"] * len(present), draws=500)

    def by_prompt(weights: Floats) -> Floats:
        """Sum over the steps of each prompt with steps."""
        return np.bincount(owner, weights, minlength=prompts)[present].astype(np.float64)

    steps = by_prompt(np.ones(len(owner)))
    rates, lengths, shares = [], [], []
    for row in admitted[:, keep]:
        accepted = by_prompt(np.minimum(data.accepted[keep], row))
        offered = by_prompt(row)
        rates.append(estimate(resampler.ratios(accepted, offered)[MACRO]))
        lengths.append(estimate(resampler.ratios(accepted + steps, steps)[MACRO]))
        shares.append(float(offered.sum() / (steps.sum() * data.gamma)))
    return Curve(tuple(rates), tuple(lengths), tuple(shares), int(keep.sum()))


def draw(result: ThresholdsResult) -> Figure:
    """Draw acceptance rate and tau side by side, a row for each drafter, a line for each domain."""
    t, rows = np.array(result.thresholds), len(result.curves)
    figure = new_figure(7.6, 2.6 * rows + 0.6)
    grid = figure.subplots(rows, 2, sharex=True, squeeze=False)
    for line, (label, parts) in zip(grid, result.curves.items(), strict=True):
        for i, (group, part) in enumerate(parts.items()):
            _line(line[0], t, part.acceptance_rate, i, group)
            _line(line[1], t, part.tau, i, group)
        for axes, title in zip(line, ("acceptance rate", "tau"), strict=True):
            axes.set_title(f"{label}: {title}" if rows > 1 else title)
        line[0].set_ylim(0, 1.02)
    word = "survival" if result.rule == "survival" else "conditional confidence"
    calibrated = " after STS" if result.calibrated else ""
    for axes in grid[-1]:
        axes.set_xlabel(f"threshold on {word}{calibrated}")
    legend(figure, grid[0][0])
    return figure


def _line(axes: Axes, t: Floats, points: tuple[Estimate, ...], i: int, group: str) -> None:
    value, spread = np.array([point.value for point in points]), bars(points)
    colour, style = ("#000000", "--") if group == OVERALL else (COLOURS[i - 1], "-")
    axes.plot(t, value, label=group, lw=1.5, color=colour, ls=style)
    axes.fill_between(t, value - spread[0], value + spread[1], alpha=0.12, lw=0, color=colour)


def page_tables(result: ThresholdsResult) -> list[Table]:
    """Tabulate acceptance rate and tau at four thresholds."""
    grid = result.thresholds
    chosen = [min(range(len(grid)), key=lambda i: abs(grid[i] - t)) for t in (0, 0.25, 0.5, 0.75)]
    rows = []
    for label, parts in result.curves.items():
        for group, part in parts.items():
            found = (
                f"{cells.percent(part.acceptance_rate[i].value)}, tau {part.tau[i].value:.2f}"
                for i in chosen
            )
            rows.append([label, group, *found])
    return [Table(["drafter", "domain", *(f"t = {grid[i]:.2f}" for i in chosen)], rows)]


ANALYSIS = Analysis(ThresholdsResult, "Admitting drafts above a threshold", draw, page_tables)
