"""Measure how reliable confidence is (paper, Fig. 6): reliability, ECE and ROC-AUC of a trace.

The comparison and the kinds of ROC-AUC are those of `predictions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses import cells
from sglang_dspark.evaluation.analyses.analysis import Analysis, Result, as_json
from sglang_dspark.evaluation.analyses.cells import Table
from sglang_dspark.evaluation.analyses.predictions import (
    BINS,
    Auc,
    Bin,
    Predictions,
    conditional_auc,
    ece_floor,
)
from sglang_dspark.evaluation.analyses.traced import OVERALL, step_groups
from sglang_dspark.evaluation.calibration_data import held_out, observations
from sglang_dspark.evaluation.figure_parts import COLOURS, GREY, MARKERS, bars, legend, panels
from sglang_dspark.evaluation.resampling import Estimate, Number
from sglang_dspark.evaluation.traces import DrafterFacts, Trace
from sglang_dspark.schedule.calibration import Calibration, Observations, ece, ece_debiased
from sglang_dspark.schedule.sts_file import StsFile, StsTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

TITLES = {
    "before": "raw",
    "after": "STS",
    "shifted": "STS+shift",
    "followed": "STS+shift, followed",
}
_SHORT = {"before": "raw", "after": "STS", "shifted": "+shift", "followed": "own"}
_ENOUGH = 30  # predictions in a bin; with fewer, its share accepted is too noisy


@dataclass(frozen=True)
class Summary:
    """One calibration.

    ECE judges the level. The Brier score, mean (a - label)^2, also punishes a calibration that
    reaches the level by separating good drafts from bad ones less.
    """

    ece: Estimate
    ece_debiased: Number
    ece_adaptive: Estimate
    ece_floor: Number
    brier: Number
    ece_by_position: tuple[Number, ...]
    mean_survival: Number
    mean_accepted: Number
    auc: Auc
    curve: tuple[Bin, ...]
    predictions: int


@dataclass(frozen=True)
class Group:
    """Verify steps of a domain under each calibration; None for one that was not requested.

    shifted: by position, with one temperature. followed: the same with each request's own shift.
    """

    steps: int
    auc_conditional: Number
    before: Summary
    after: Summary | None = None
    shifted: Summary | None = None
    followed: Summary | None = None

    def variants(self) -> dict[str, Summary]:
        """Return the calibrations present, in this order."""
        every = {"before": self.before, "after": self.after}
        every |= {"shifted": self.shifted, "followed": self.followed}
        return {name: found for name, found in every.items() if found is not None}


Groups = Mapping[str, Group]  # domain -> its steps; `overall` last


@dataclass(frozen=True)
class ReliabilityResult(Result):
    """One drafter; prompts: number of prompts that it was judged on."""

    analysis: ClassVar[str] = "reliability"
    label: str
    drafter: DrafterFacts
    prompts: int
    calibrations: Mapping[str, Calibration]
    groups: Groups


def compute(label: str, trace: Trace, sts: StsFile | None) -> ReliabilityResult:
    """Measure the reliability of a trace before and after each step of a table.

    Prompts that the table was fitted on are skipped. Raises DSparkError if that leaves no prompt.
    """
    calibrations: dict[str, Calibration] = {}
    if sts is not None:
        keep = held_out(trace.prompts, sts.fit_prompts)
        if not keep:
            raise DSparkError("the table was fitted on all of these prompts: give others")
        trace = trace.of_prompts(keep)
        calibrations = _steps_of(sts.table(trace.temperature))
    return ReliabilityResult(
        target=trace.target,
        settings=dict(trace.settings),
        label=label,
        drafter=trace.drafter,
        prompts=len(trace.prompts),
        calibrations=calibrations,
        groups=reliability(trace, calibrations),
    )


def _steps_of(table: StsTable) -> dict[str, Calibration]:
    """Return the steps of a table to show: temperatures, shifts, requests followed."""
    found = {"after": table.plain, "shifted": table.shifted}
    if table.request_spread > 0:
        found["followed"] = table.followed
    return found


def reliability(trace: Trace, calibrations: Mapping[str, Calibration]) -> dict[str, Group]:
    """Summarise by domain and overall: `before`, and under each named calibration of `Group`."""
    data = observations(trace.generations, trace.gamma)
    groups = step_groups(trace, data)
    groups[OVERALL] = groups.pop(OVERALL)  # last
    result = {}
    for name, rows in groups.items():
        chosen = data.of_steps(rows)
        if len(chosen.logits):
            result[name] = Group(
                len(chosen.logits),
                conditional_auc(chosen),
                _summary(chosen, Calibration.identity(trace.gamma)),
                **{variant: _summary(chosen, each) for variant, each in calibrations.items()},
            )
    return result


def _summary(data: Observations, calibration: Calibration) -> Summary:
    found = Predictions.of(data, calibration)
    by_position = []
    for k in range(1, data.gamma + 1):
        chosen = found.position == k
        by_position.append(ece(found.survival[chosen], found.label[chosen], bins=BINS))
    return Summary(
        ece=found.calibration(),
        ece_debiased=ece_debiased(found.survival, found.label, found.request, bins=BINS),
        ece_adaptive=found.calibration("mass"),
        ece_floor=ece_floor(data, calibration),
        brier=float(np.mean((found.survival - found.label) ** 2)),
        ece_by_position=tuple(by_position),
        mean_survival=float(found.survival.mean()),
        mean_accepted=float(found.label.mean()),
        auc=found.auc(),
        curve=found.curve(),
        predictions=len(found.survival),
    )


def held_out_summary(groups: Groups) -> dict[str, Any]:
    """Return ECE, Brier score and AUCs by domain, for the calibration file; null is unknown."""
    kept = ("ece", "ece_debiased", "ece_floor", "brier")
    found = {}
    for name, group in groups.items():
        row: dict[str, Any] = {"steps": group.steps, "auc_conditional": group.auc_conditional}
        for variant, summary in group.variants().items():
            row[variant] = {key: getattr(summary, key) for key in kept}
            row[variant]["auc_pooled"] = summary.auc.pooled
            row[variant]["auc_within_position"] = summary.auc.within
        found[name] = row
    return dict(as_json(found))


def draw(result: ReliabilityResult) -> Figure:
    """Draw share accepted against survival, a panel per domain, a line per calibration."""
    figure, row = panels(len(result.groups), height=3.7)
    for axes, (name, group) in zip(row, result.groups.items(), strict=True):
        axes.plot([0, 1], [0, 1], color=GREY, lw=1)
        errors = []
        for variant, summary in group.variants().items():
            _curve(axes, summary.curve, variant)
            errors.append(f"{100 * summary.ece.value:.1f}%")
        auc = group.before.auc
        axes.set_title(
            f"{name}\nECE {' → '.join(errors)}\nAUC {auc.pooled:.2f}, in position {auc.within:.2f}",
            fontsize=8.5,
        )
        axes.set(xlabel="predicted survival", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    row[0].set_ylabel("share accepted")
    legend(figure, row[0])
    return figure


def _curve(axes: Axes, curve: tuple[Bin, ...], variant: str) -> None:
    """Draw a line through the bins that hold enough, and the others as faint points."""
    i = list(TITLES).index(variant)
    colour, marker = COLOURS[i], MARKERS[i]
    full = [row for row in curve if row.count >= _ENOUGH]
    found = [Estimate(row.accepted, row.low, row.high) for row in full]
    axes.errorbar(
        [row.predicted for row in full], [f.value for f in found], bars(found),
        fmt=marker + "-", ms=4, color=colour, label=TITLES[variant], lw=1.2, elinewidth=1,
    )  # fmt: skip
    few = [row for row in curve if row.count < _ENOUGH]
    axes.plot(
        [row.predicted for row in few], [row.accepted for row in few], marker, ms=3,
        color=colour, alpha=0.3,
    )  # fmt: skip


def page_tables(result: ReliabilityResult) -> list[Table]:
    """Tabulate ECE and Brier score of each calibration and the kinds of ROC-AUC, by domain."""
    names = list(result.groups[OVERALL].variants())
    rows = []
    for name, group in result.groups.items():
        known = [group.variants()[variant] for variant in names]
        auc = group.before.auc
        rows.append(
            [
                name,
                str(group.steps),
                *(cells.share_interval(each.ece) for each in known),
                cells.percent(known[-1].ece_floor),
                *(f"{each.brier:.4f}" for each in known),
                *(cells.number(x) for x in (auc.pooled, auc.within, group.auc_conditional)),
            ]
        )
    head = ["domain", "steps", *(f"ECE {name}" for name in names), "ECE floor"]
    head += [f"Brier {name}" for name in names]
    return [Table([*head, "AUC", "in position", "conditional"], rows)]


def table(result: ReliabilityResult) -> list[RenderableType]:
    """Return the terminal output of this drafter; see `lines`."""
    return lines(f"{result.label}: {result.prompts} held-out prompts", result.groups)


def lines(title: str, groups: Groups) -> list[RenderableType]:
    """Return a table of ECE with its floor and ROC-AUC by domain, and a line per calibration."""
    from rich.table import Table as Shown
    from rich.text import Text

    overall = groups[OVERALL].variants()
    shown = Shown(
        title=title, caption="floor: what perfect calibration would show on this much data"
    )
    shown.add_column("domain")
    names = ["steps", *(f"ECE {_SHORT[name]}" for name in overall), "floor"]
    for name in [*names, "AUC pooled", "AUC in position"]:
        shown.add_column(name, justify="right")
    for name, group in groups.items():
        known, auc = list(group.variants().values()), group.before.auc
        errors = [f"{each.ece.value:.1%}" for each in known] + [f"{known[-1].ece_floor:.1%}"]
        shown.add_row(name, str(group.steps), *errors, f"{auc.pooled:.3f}", f"{auc.within:.3f}")
    return [shown, *(Text(_line(name, found)) for name, found in overall.items())]


def _line(variant: str, found: Summary) -> str:
    return (
        f"{TITLES[variant]}: ECE {found.ece.value:.2%} "
        f"({found.ece.low:.2%} to {found.ece.high:.2%}), "
        f"debiased {found.ece_debiased:.2%}, Brier {found.brier:.4f}, "
        f"AUC {found.auc.pooled:.3f}, in position {found.auc.within:.3f}"
    )


def _drafters_json(result: ReliabilityResult) -> dict[str, Any]:
    """Return AUC overall and ECE by domain, for drafters.json."""
    auc = result.groups[OVERALL].before.auc
    found: dict[str, Any] = {"auc": auc.pooled, "auc_within_position": auc.within}
    for name in TITLES:
        errors = {
            domain: group.variants()[name].ece.value
            for domain, group in result.groups.items()
            if name in group.variants()
        }
        if errors:
            found[f"ece_{name}"] = errors
    return found


ANALYSIS = Analysis(
    ReliabilityResult,
    "Predicted survival against what happened",
    draw,
    page_tables,
    table,
    _drafters_json,
)
