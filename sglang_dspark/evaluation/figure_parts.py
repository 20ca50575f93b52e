"""What the figures share: colours and markers, rows of panels, legends, error bars.

Colours are the Okabe-Ito set, which colour-blind readers tell apart; every series also has a marker
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#F0E442",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
GREY = "#888888"


def panels(count: int, width: float = 2.7, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A row of panels that share their y axis."""
    figure = Figure(figsize=(max(5.2, width * count + 0.5), height), layout="constrained")
    axes = figure.subplots(1, count, sharey=True, squeeze=False)
    return figure, list(axes[0])


def colour_of(i: int) -> str:
    """Colour of the i-th series."""
    return COLOURS[i % len(COLOURS)]


def marker_of(i: int) -> str:
    """Marker of the i-th series."""
    return MARKERS[i % len(MARKERS)]


def legend(figure: Figure, axes: Axes) -> None:
    """One legend below all panels, from the series of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), 4 if figure.get_figwidth() > 6 else 2)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def bars(points: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Lengths of error bars [2, n], zero where an interval is unknown."""
    value = np.array([number(p["value"]) for p in points])
    low = np.array([number(p["low"]) for p in points])
    high = np.array([number(p["high"]) for p in points])
    return np.nan_to_num(np.clip(np.stack([value - low, high - value]), 0, None))


def number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
