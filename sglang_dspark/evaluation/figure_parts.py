"""Provide the parts that figures share: colours, markers, rows of panels, legends, error bars.

matplotlib is imported when a figure is created. Colours are the Okabe-Ito set, which colour-blind
readers can distinguish; every series also has its own marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sglang_dspark.evaluation.resampling import Estimate, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#F0E442",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
GREY = "#888888"


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure; width and height are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def panels(count: int, width: float = 2.7, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """Create a row of panels that share their y axis."""
    figure = new_figure(max(5.2, width * count + 0.5), height)
    axes = figure.subplots(1, count, sharey=True, squeeze=False)
    return figure, list(axes[0])


def whole_numbers(axes: Axes) -> None:
    """Place x ticks at integers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def colour_of(i: int) -> str:
    """Return the colour of the i-th series."""
    return COLOURS[i % len(COLOURS)]


def marker_of(i: int) -> str:
    """Return the marker of the i-th series."""
    return MARKERS[i % len(MARKERS)]


def legend(figure: Figure, axes: Axes) -> None:
    """Draw one legend below all panels, from the series of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), 4 if figure.get_figwidth() > 6 else 2)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def bars(points: Sequence[Estimate]) -> Floats:
    """Return the lengths of error bars [2, n], zero where an interval is unknown."""
    value = np.array([point.value for point in points])
    low = np.array([point.low for point in points])
    high = np.array([point.high for point in points])
    return np.nan_to_num(np.clip(np.stack([value - low, high - value]), 0, None))
