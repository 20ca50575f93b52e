"""Compute the ROC of confidence: how well raw survival a_k separates accepted drafts from others.

A point is (share of the rejected drafts above a threshold, share of the accepted ones above it).
The areas are those of `predictions`: pooled over positions, within positions, and of each position.
Only verified drafts count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sglang_dspark.evaluation.analyses import cells
from sglang_dspark.evaluation.analyses.analysis import Analysis
from sglang_dspark.evaluation.analyses.cells import Table
from sglang_dspark.evaluation.analyses.predictions import Auc, Predictions, conditional_auc
from sglang_dspark.evaluation.analyses.traced import TracedResult, origin, step_groups
from sglang_dspark.evaluation.calibration_data import observations
from sglang_dspark.evaluation.figure_parts import GREY, colour_of, legend, panels
from sglang_dspark.evaluation.resampling import Number
from sglang_dspark.evaluation.traces import Trace, require_comparable
from sglang_dspark.schedule.calibration import Calibration, Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 60


@dataclass(frozen=True)
class RocAuc(Auc):
    """The ROC-AUCs of `predictions`, the conditional one included."""

    conditional: Number


@dataclass(frozen=True)
class Curve:
    """Points of a ROC from (0, 0) to (1, 1); empty if all labels are the same."""

    false_positive: tuple[float, ...]
    true_positive: tuple[float, ...]


@dataclass(frozen=True)
class Group:
    """One drafter in one domain; drafts: number of verified ones."""

    auc: RocAuc
    curve: Curve
    drafts: int


@dataclass(frozen=True)
class RocResult(TracedResult):
    """label -> domain or overall -> areas and curve."""

    analysis: ClassVar[str] = "roc"
    groups: Mapping[str, Mapping[str, Group]]


def compute(traces: Mapping[str, Trace]) -> RocResult:
    """Compute curves and areas by domain and overall, for drafters with a confidence."""
    require_comparable(list(traces.values()), list(traces))
    found = {}
    for label, trace in traces.items():
        data = observations(trace.generations, trace.gamma)
        parts = {}
        for name, rows in step_groups(trace, data).items():
            chosen = data.of_steps(rows)
            predictions = Predictions.of(chosen, Calibration.identity(trace.gamma))
            auc = predictions.auc()
            parts[name] = Group(
                RocAuc(auc.pooled, auc.within, auc.by_position, conditional_auc(chosen)),
                roc_curve(predictions.survival, predictions.label),
                len(predictions.label),
            )
        found[label] = parts
    return RocResult(*origin(traces), groups=found)


def roc_curve(value: Floats, label: Floats) -> Curve:
    """Return at most 62 points of the ROC of value [n] for label [n] in {0, 1}.

    Equal values form one point.
    """
    order = np.argsort(-value, kind="stable")
    hits, misses = np.cumsum(label[order]), np.cumsum(1 - label[order])
    if len(label) == 0 or hits[-1] == 0 or misses[-1] == 0:
        return Curve((), ())
    last_of_equals = np.append(np.diff(value[order]) != 0, True)
    x = np.append(0.0, misses[last_of_equals] / misses[-1])
    y = np.append(0.0, hits[last_of_equals] / hits[-1])
    kept = np.unique(np.searchsorted(x, np.linspace(0, 1, _POINTS), side="right") - 1)
    kept = np.unique(np.concatenate([[0], kept, [len(x) - 1]]))
    return Curve(tuple(x[kept].tolist()), tuple(y[kept].tolist()))


def draw(result: RocResult) -> Figure:
    """Draw true against false positives of survival, a panel per domain, a line per drafter."""
    groups = list(next(iter(result.groups.values())))
    figure, row = panels(len(groups), height=3.4)
    for axes, group in zip(row, groups, strict=True):
        axes.plot([0, 1], [0, 1], color=GREY, lw=1)
        areas = []
        for i, (label, parts) in enumerate(result.groups.items()):
            curve, area = parts[group].curve, parts[group].auc.pooled
            axes.plot(
                curve.false_positive, curve.true_positive, color=colour_of(i), label=label, lw=1.4
            )
            areas.append(cells.UNKNOWN if math.isnan(area) else f"{area:.2f}")
        axes.set_title(f"{group}\nAUC {', '.join(areas)}", fontsize=9)
        axes.set(xlabel="of rejected drafts", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    row[0].set_ylabel("of accepted drafts")
    legend(figure, row[0])
    return figure


def page_tables(result: RocResult) -> list[Table]:
    """Tabulate the areas."""
    rows = [
        [label, group, *map(cells.number, (auc.pooled, auc.within, auc.conditional))]
        for label, parts in result.groups.items()
        for group, auc in ((name, part.auc) for name, part in parts.items())
    ]
    return [Table(["drafter", "domain", "AUC", "in position", "conditional"], rows)]


ANALYSIS = Analysis(
    RocResult, "Telling accepted drafts from others by confidence", draw, page_tables
)
