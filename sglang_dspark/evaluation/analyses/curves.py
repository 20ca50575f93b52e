"""Show learning curves of training runs from their journals (`training/journal.py`).

Held-out answers, never trained on, give tau at temperature 1, teacher forced:
the mean over anchors of 1 + sum_k prod_{i<=k} sum_v min(p_i(v), q_i(v)) along the target's
own tokens (`training/metrics.py`). It is no decoding, but one measure for all kinds of drafters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sglang_dspark.common.files import load_json, parse_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses import cells
from sglang_dspark.evaluation.analyses.analysis import Analysis, Result
from sglang_dspark.evaluation.analyses.cells import Table
from sglang_dspark.evaluation.figure_parts import colour_of, legend, marker_of, panels
from sglang_dspark.evaluation.resampling import Number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """A measurement; the ECE exists only for drafters with a confidence."""

    step: int
    held_out_tau: Number
    held_out_loss: Number | None = None
    held_out_ece: Number | None = None


@dataclass(frozen=True)
class Run:
    """A training run and its measurements by ascending step; sequences: of its training data."""

    kind: str
    layers: int
    head: str
    commit: str
    target: str
    target_sha256: str
    sequences: int
    planned_steps: int
    anchors_per_step: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class CurvesResult(Result):
    """Runs by label."""

    analysis: ClassVar[str] = "curves"
    runs: Mapping[str, Run]


def compute(runs: Sequence[tuple[str, Path]]) -> CurvesResult:
    """Read held-out tau by step from several run directories of one target.

    runs: label and directory (run.json, metrics.jsonl) of each. Raises DSparkError for a directory
    that is no run, one without a measurement, several targets, and labels that repeat.
    """
    labels = [label for label, _ in runs]
    if len(set(labels)) < len(labels):
        raise DSparkError(f"labels must differ here, found {', '.join(labels)}")
    read = {label: _run(folder) for label, folder in runs}
    targets = {each.target_sha256 for each in read.values()}
    if len(targets) > 1:
        raise DSparkError(f"the runs {', '.join(labels)} are of {len(targets)} targets, not of one")
    target = next(iter(read.values())).target
    return CurvesResult(target, {"temperature": 1.0, "teacher_forced": True}, read)


def _run(folder: Path) -> Run:
    """Read the facts and measured points of one run."""
    with reading(folder, "training run", "name a run_dir of `dspark train`"):
        facts = load_json(folder / "run.json", finite=False)
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [parse_json(line, finite=False) for line in lines]
        config = facts["config"]
        shape, schedule = config["drafter"], config["schedule"]
        found = Run(
            kind=shape["kind"],
            layers=shape.get("layers", 1),
            head=shape.get("markov_head_type", "none"),
            commit=facts["commit"],
            target=Path(config["data"]["target"]).name,
            target_sha256=facts["target_sha256"],
            sequences=facts["sequences"],
            planned_steps=schedule["steps"],
            anchors_per_step=schedule["sequences_per_step"] * schedule["anchors_per_sequence"],
            points=_points(rows),
        )
    if not found.points:
        raise DSparkError(f"{folder}: nothing was measured on held-out answers yet")
    return found


def _points(rows: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    """Return the measured rows; for a step that was repeated after a resume, the last one."""
    kept = {
        int(row["step"]): Point(
            int(row["step"]),
            row["held_out_tau"],
            row.get("held_out_loss"),
            row.get("held_out_ece"),
        )
        for row in rows
        if "held_out_tau" in row
    }
    return tuple(kept[step] for step in sorted(kept))


def draw(result: CurvesResult) -> Figure:
    """Draw held-out tau by step, one line per run."""
    figure, (axes,) = panels(1, width=6.2, height=3.9)
    every = [[point.held_out_tau for point in run.points] for run in result.runs.values()]
    last, lowest = [value[-1] for value in every], min(map(min, every))
    heights = _apart(last, 0.035 * (max(last) - lowest))
    for i, (label, run) in enumerate(result.runs.items()):
        step, value, colour = [point.step for point in run.points], every[i], colour_of(i)
        axes.plot(step, value, marker_of(i) + "-", color=colour, label=label, ms=4)
        axes.annotate(
            f"{value[-1]:.2f}", (step[-1], heights[i]), (5, 0), textcoords="offset points",
            va="center", fontsize=7, color=colour,
        )  # fmt: skip
    axes.set_xlabel("training step")
    axes.set_ylabel("held-out tau")
    axes.margins(x=0.08)
    legend(figure, axes)
    return figure


def _apart(values: Sequence[float], least: float) -> list[float]:
    """Space label heights next to values: same order, `least` apart, moved up minimally."""
    heights, free = list(values), -np.inf
    for i in np.argsort(values, kind="stable"):
        heights[i] = max(values[i], free)
        free = heights[i] + least
    return heights


def page_tables(result: CurvesResult) -> list[Table]:
    """Tabulate held-out tau at every 500th step, or at all steps if there is no such step."""
    steps = sorted({point.step for run in result.runs.values() for point in run.points})
    shown = [step for step in steps if step % 500 == 0] or steps
    rows = []
    for label, run in result.runs.items():
        known = {point.step: point.held_out_tau for point in run.points}
        rows.append([label, str(run.layers), *(cells.number(known.get(step)) for step in shown)])
    return [Table(["held-out tau", "layers", *(f"step {step}" for step in shown)], rows)]


ANALYSIS = Analysis(CurvesResult, "Held-out tau while training, teacher forced", draw, page_tables)
