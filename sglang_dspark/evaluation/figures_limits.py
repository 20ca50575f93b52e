"""Figures of learning curves, of ROC, and of what keeps drafters from more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sglang_dspark.evaluation.figure_parts import (
    COLOURS,
    GREY,
    MARKERS,
    bars,
    colour_of,
    legend,
    marker_of,
    panels,
)

_SIDES = (("ours", "{0}"), ("theirs", "{1}"), ("both", "both at once"))


def draw_curves(metrics: Mapping[str, Any]) -> Figure:
    """Held-out tau by step, one line a run."""
    figure, (axes,) = panels(1, width=6.2, height=3.9)
    last = [run["points"][-1]["held_out_tau"] for run in metrics["runs"].values()]
    lowest = min(p["held_out_tau"] for run in metrics["runs"].values() for p in run["points"])
    heights = _apart(last, 0.035 * (max(last) - lowest))
    for i, (label, run) in enumerate(metrics["runs"].items()):
        step = [point["step"] for point in run["points"]]
        value = [point["held_out_tau"] for point in run["points"]]
        colour = colour_of(i)
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
    """Heights of labels beside values: the same order, `least` apart, moved as little upwards."""
    heights, free = list(values), -np.inf
    for i in np.argsort(values, kind="stable"):
        heights[i] = max(values[i], free)
        free = heights[i] + least
    return heights


def draw_roc(metrics: Mapping[str, Any]) -> Figure:
    """True against false positives of survival, a panel a domain, a line a drafter."""
    drafters = metrics["groups"]
    groups = list(next(iter(drafters.values())))
    figure, row = panels(len(groups), height=3.4)
    for axes, group in zip(row, groups, strict=True):
        axes.plot([0, 1], [0, 1], color=GREY, lw=1)
        areas = []
        for i, (label, parts) in enumerate(drafters.items()):
            curve, auc = parts[group]["curve"], parts[group]["auc"]
            x, y = curve["false_positive"], curve["true_positive"]
            axes.plot(x, y, color=colour_of(i), label=label, lw=1.4)
            areas.append("-" if auc["pooled"] is None else f"{auc['pooled']:.2f}")
        axes.set_title(f"{group}\nAUC {', '.join(areas)}", fontsize=9)
        axes.set(xlabel="of rejected drafts", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    row[0].set_ylabel("of accepted drafts")
    legend(figure, row[0])
    return figure


def draw_limits(metrics: Mapping[str, Any]) -> Figure:
    """Left: what lies outside the vocabulary. Right: a panel for each pair at common anchors."""
    pairs = metrics["same_anchors"]
    figure = Figure(figsize=(4.2 + 2.6 * len(pairs), 3.6), layout="constrained")
    grid = figure.subplots(1, 1 + len(pairs), width_ratios=[1.5, *[1] * len(pairs)], squeeze=False)
    _draw_outside(grid[0][0], metrics)
    for axes, (pair, found) in zip(grid[0][1:], pairs.items(), strict=True):
        _draw_pair(axes, pair, found)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=len(labels))
    return figure


def _draw_outside(axes: Axes, metrics: Mapping[str, Any]) -> None:
    """Shares by domain: of the answer's tokens, and of each drafter's rejections."""
    shares = {"answer tokens": metrics["outside"]}
    shares |= {f"rejections, {k}": v for k, v in metrics["rejected_outside"].items()}
    groups = list(metrics["outside"])
    width = 0.84 / len(shares)
    for i, (label, found) in enumerate(shares.items()):
        points = [found[group] for group in groups]
        place = np.arange(len(groups)) + (i - (len(shares) - 1) / 2) * width
        axes.bar(
            place, [100 * p["value"] for p in points], width * 0.94, yerr=100 * bars(points),
            color=GREY if i == 0 else colour_of(i - 1), label=label,
            error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
        )  # fmt: skip
    axes.set_xticks(np.arange(len(groups)), groups)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("%")
    axes.set_title("outside the draft vocabulary,\nof answer tokens and of rejections", fontsize=9)


def _draw_pair(axes: Axes, pair: str, found: Mapping[str, Any]) -> None:
    """Cumulative acceptance of two drafters where both stood, in macro average."""
    names = pair.split("/", 1)
    for i, (side, title) in enumerate(_SIDES):
        points = [each["macro"] for each in found["cumulative"][side]]
        style = "--" if side == "both" else "-"
        axes.errorbar(
            np.arange(1, len(points) + 1), [p["value"] for p in points], bars(points),
            fmt=MARKERS[i] + style, color=COLOURS[i], label=title.format(*names), ms=4, capsize=2,
        )  # fmt: skip
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("draft position k")
    axes.set_title(f"drafts 1..k accepted at\n{found['anchors']} common anchors", fontsize=9)
    axes.legend(fontsize=7)
