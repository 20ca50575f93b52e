"""Figures of the drafter analyses, drawn from the metrics of their result files.

The same metrics always give the same file, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sglang_dspark.common.writing import replacing
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.figure_parts import (
    COLOURS,
    GREY,
    MARKERS,
    bars,
    colour_of,
    legend,
    marker_of,
    number,
    panels,
)
from sglang_dspark.evaluation.figures_limits import draw_curves, draw_limits, draw_roc

_ENOUGH = 30  # predictions in a bin, below which its share accepted says little
_VARIANTS = {
    "before": "raw",
    "after": "STS",
    "shifted": "STS+shift",
    "followed": "STS+shift, followed",
}
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "svg.hashsalt": "sglang-dspark",
    "figure.dpi": 100,
    "savefig.dpi": 160,
}
_CAPTIONS = {
    "tau": "Accepted tokens a step, 95% over prompts",
    "positions": "Acceptance of draft k given drafts 1..k-1, and of drafts 1..k",
    "depth": "Accepted tokens a step by drafter depth",
    "length": "Accepted tokens a step by proposal length",
    "overhead": "Share of a round spent in the sequential loop",
    "thresholds": "Admitting drafts above a threshold",
    "roc": "Telling accepted drafts from others by confidence",
    "reliability": "Predicted survival against what happened",
    "curves": "Held-out tau while training, teacher forced",
    "limits": "What the draft vocabulary ends, and drafts at the same anchors",
}


def caption(metrics: Mapping[str, Any]) -> str:
    """One line on what the figure of these metrics shows, and of what."""
    settings = metrics["settings"]
    cold = settings["temperature"] == 0
    decoding = "greedy" if cold else f"temperature {settings['temperature']:g}"
    said = [str(metrics["target"]), decoding, *filter(None, [metrics.get("note")])]
    return f"{_CAPTIONS[metrics['analysis']]} ({', '.join(said)})"


def draw(metrics: Mapping[str, Any]) -> Figure:
    """The figure of one analysis. Raises DSparkError for an analysis that has none."""
    name = metrics.get("analysis")
    if name not in _DRAWERS:
        raise DSparkError(f"no figure for the analysis {name!r}; known: {', '.join(_DRAWERS)}")
    with mpl.rc_context(_STYLE):
        figure = _DRAWERS[str(name)](metrics)
        figure.suptitle(caption(metrics), fontsize=10, x=0.01, ha="left")
        figure.draw_without_rendering()  # lays out once; saving in two formats need not again
        figure.set_layout_engine("none")
        return figure


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg, each to a temporary name first."""
    written = []
    try:
        for kind in ("png", "svg"):
            path = stem.with_name(f"{stem.name}.{kind}")
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            with replacing(path) as temporary, mpl.rc_context(_STYLE):
                figure.savefig(temporary, format=kind, metadata=metadata)
            written.append(path)
    except OSError as error:
        raise DSparkError(f"cannot write the figure {stem}: {error.strerror}") from error
    return written


def _tau(metrics: Mapping[str, Any]) -> Figure:
    labels = list(metrics["tau"])
    groups = list(metrics["tau"][labels[0]])
    across = max(1.1 + 0.36 * len(labels) * len(groups), 6.4)  # the least that the caption needs
    figure, (axes,) = panels(1, width=across, height=3.3)
    width = 0.82 / len(labels)
    for i, label in enumerate(labels):
        place = np.arange(len(groups)) + (i - (len(labels) - 1) / 2) * width
        value = np.array([metrics["tau"][label][group] for group in groups])
        bounds = np.array([metrics["interval"][label][group] for group in groups])
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


def _positions(metrics: Mapping[str, Any]) -> Figure:
    """Conditional acceptance above, cumulative below, a column for each domain."""
    shown = [("curves", "given drafts 1..k-1"), ("cumulative", "drafts 1..k")]
    groups = list(next(iter(metrics["curves"].values())))
    figure = Figure(figsize=(2.5 * len(groups) + 0.5, 5.2), layout="constrained")
    grid = figure.subplots(2, len(groups), sharex=True, sharey=True, squeeze=False)
    for row, (key, name) in zip(grid, shown, strict=True):
        for axes, group in zip(row, groups, strict=True):
            for i, (label, parts) in enumerate(metrics[key].items()):
                _position_line(axes, parts[group], i, label)
            axes.set_ylim(0, 1)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        row[0].set_ylabel(f"accepted, {name}")
    for axes, group in zip(grid[0], groups, strict=True):
        axes.set_title(group)
    for axes in grid[1]:
        axes.set_xlabel("draft position k")
    legend(figure, grid[0][0])
    return figure


def _position_line(axes: Axes, points: Sequence[Mapping[str, Any]], i: int, label: str) -> None:
    k = np.arange(1, len(points) + 1)
    value, spread = np.array([number(point["value"]) for point in points]), bars(points)
    axes.plot(k, value, marker_of(i) + "-", color=colour_of(i), label=label, ms=4)
    axes.fill_between(k, value - spread[0], value + spread[1], color=colour_of(i), alpha=0.15, lw=0)


def _against(metrics: Mapping[str, Any], x_label: str) -> Figure:
    """tau against a whole number, one line a series: macro average first, then each domain."""
    curves = metrics["curves"]
    groups = list(next(iter(curves.values()))[0]["tau"])
    groups = [groups[-1], *groups[:-1]]
    figure, row = panels(len(groups))
    for axes, group in zip(row, groups, strict=True):
        for i, (label, points) in enumerate(curves.items()):
            x = [point["x"] for point in points]
            found = [point["tau"][group] for point in points]
            axes.errorbar(
                x, [f["value"] for f in found], bars(found), fmt=marker_of(i) + "-",
                color=colour_of(i), label=label, ms=4, capsize=2, elinewidth=1,
            )  # fmt: skip
        axes.set_title(group)
        axes.set_xlabel(x_label)
        axes.set_xticks(sorted({p["x"] for points in curves.values() for p in points}))
    row[0].set_ylabel("tau")
    legend(figure, row[0])
    return figure


def _depth(metrics: Mapping[str, Any]) -> Figure:
    return _against(metrics, "drafter layers")


def _length(metrics: Mapping[str, Any]) -> Figure:
    return _against(metrics, "proposal length gamma")


def _overhead(metrics: Mapping[str, Any]) -> Figure:
    rows = metrics["drafters"]
    figure, (axes,) = panels(1, height=1.7 + 0.75 * len(rows))
    kinds = [("engine", "wall"), ("engine", "thread_cpu"), ("direct", "wall"),
             ("direct", "thread_cpu")]  # fmt: skip
    place = np.arange(len(rows), dtype=np.float64)
    for i, (way, clock) in enumerate(kinds):
        found = [row[way][clock] for row in rows]
        share = 100 * np.array([f["share"] for f in found])
        y = place + (i - 1.5) * 0.2
        axes.barh(y, share, 0.18, color=COLOURS[i], label=f"{way}, {clock.replace('_', ' ')}")
        for x, at, each in zip(share, y, found, strict=True):
            high = max(x, 100 * each.get("share_high", each["share"]), 0)
            if "share_low" in each:
                axes.plot([100 * each["share_low"], high], [at, at], color="#333333", lw=1)
            axes.annotate(f"{x:.2f}%", (high, at), (3, 0), textcoords="offset points",
                          va="center", fontsize=7)  # fmt: skip
    axes.set_yticks(place, [f"{row['label']}\ngamma {row['gamma']}" for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    axes.set_xlabel(f"% of a round, batch {rows[0]['engine']['batch']}")
    legend(figure, axes)
    return figure


def _thresholds(metrics: Mapping[str, Any]) -> Figure:
    curves, t = metrics["curves"], np.array(metrics["thresholds"])
    rows = len(curves)
    figure = Figure(figsize=(7.6, 2.6 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, 2, sharex=True, squeeze=False)
    names = (("acceptance_rate", "acceptance rate"), ("tau", "tau"))
    for line, (label, parts) in zip(grid, curves.items(), strict=True):
        for axes, (key, title) in zip(line, names, strict=True):
            for i, (group, part) in enumerate(parts.items()):
                value = np.array([number(point["value"]) for point in part[key]])
                spread = bars(part[key])
                style = {"color": "#000000", "ls": "--"} if group == "overall" else {}
                style = style or {"color": COLOURS[i - 1]}
                axes.plot(t, value, label=group, lw=1.5, **style)
                axes.fill_between(t, value - spread[0], value + spread[1], alpha=0.12, lw=0,
                                  color=style["color"])  # fmt: skip
            axes.set_title(f"{label}: {title}" if rows > 1 else title)
        line[0].set_ylim(0, 1.02)
    word = "survival" if metrics["rule"] == "survival" else "conditional confidence"
    calibrated = " after STS" if metrics["calibrated"] else ""
    for axes in grid[-1]:
        axes.set_xlabel(f"threshold on {word}{calibrated}")
    legend(figure, grid[0][0])
    return figure


def _reliability(metrics: Mapping[str, Any]) -> Figure:
    groups = metrics["groups"]
    figure, row = panels(len(groups), height=3.7)
    for axes, (group, part) in zip(row, groups.items(), strict=True):
        axes.plot([0, 1], [0, 1], color=GREY, lw=1)
        errors = []
        for i, (name, title) in enumerate(_VARIANTS.items()):
            if name not in part:
                continue
            _reliability_curve(axes, part[name]["curve"], i, title)
            errors.append(f"{100 * part[name]['ece']['value']:.1f}%")
        auc = part["before"]["auc"]
        pooled, within = number(auc["pooled"]), number(auc["within"])
        axes.set_title(
            f"{group}\nECE {' → '.join(errors)}\nAUC {pooled:.2f}, in position {within:.2f}",
            fontsize=8.5,
        )
        axes.set(xlabel="predicted survival", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    row[0].set_ylabel("share accepted")
    legend(figure, row[0])
    return figure


def _reliability_curve(axes: Axes, curve: Sequence[Mapping[str, Any]], i: int, title: str) -> None:
    """A line through the bins that hold enough; the others are faint points, for what they tell."""
    colour, marker = COLOURS[i], MARKERS[i]
    full = [row for row in curve if row["count"] >= _ENOUGH]
    found = [{"value": r["accepted"], "low": r["low"], "high": r["high"]} for r in full]
    axes.errorbar(
        [row["predicted"] for row in full], [f["value"] for f in found], bars(found),
        fmt=marker + "-", ms=4, color=colour, label=title, lw=1.2, elinewidth=1,
    )  # fmt: skip
    few = [row for row in curve if row["count"] < _ENOUGH]
    axes.plot(
        [row["predicted"] for row in few], [row["accepted"] for row in few], marker, ms=3,
        color=colour, alpha=0.3,
    )  # fmt: skip


_DRAWERS: dict[str, Callable[[Mapping[str, Any]], Figure]] = {
    "tau": _tau,
    "positions": _positions,
    "depth": _depth,
    "length": _length,
    "overhead": _overhead,
    "thresholds": _thresholds,
    "roc": draw_roc,
    "reliability": _reliability,
    "curves": draw_curves,
    "limits": draw_limits,
}
