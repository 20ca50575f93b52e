"""Embed figures in the page of a sweep's report, with tooltips at points and labels.

The SVG has the ink, grid and background of the page, so one drawing serves light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from sglang_dspark.loadtest.report.data import GREY

INK, GRID = "#1b1f23", "#dfe3e7"
_TIP = "tip: "
_NUDGES = [*product((4, -4), (4, -4)), *product((9, -9), (9, -9)), *product((16, -16), (2, -14))]
_REACH = 4.0  # points around a marker that no label may cover


def tip(axes: Axes, x: float, y: float, text: str) -> None:
    """Add a tooltip with `text` at (x, y), on an invisible marker."""
    axes.plot([x], [y], "o", ms=12, mew=0, alpha=0, gid=_TIP + text)


def inline(figure: Figure, stem: str) -> str:
    """Return the figure as an SVG element, with the page's colours and ids that begin with `stem`.

    Call within the figures' style. The page must hold elements `stem`-title and `stem`-caption.
    """
    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = text.replace(f'<g id="{_TIP}', '<g data-tip="')
    prefix = f"{stem}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'href="#', f'href="#{prefix}', text)
    text = text.replace("url(#", f"url(#{prefix}")
    for fixed, variable in ((INK, "--ink"), (GRID, "--rule"), (GREY, "--grey")):
        text = text.replace(fixed, f"var({variable})")
    label = f'role="img" aria-labelledby="{stem}-title {stem}-caption" '
    return text.replace("<svg ", f'<svg class="figure" {label}', 1)


def label_points(
    figure: Figure, axes: Axes, points: Sequence[tuple[float, float, str, str]]
) -> None:
    """Write a small label next to each point (x, y, text, colour), clear of other text and points.

    All else of the figure must be drawn before, as its layout is fixed here. If no place nearby is
    free, the label is put where it covers least.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    taken = [text.get_window_extent() for text in axes.texts]
    reach = _REACH * figure.dpi / 72
    for x, y, *_ in points:
        at = axes.transData.transform((x, y))
        taken.append(Bbox([at - reach, at + reach]))
    for x, y, text, colour in points:
        label = axes.annotate(
            text, (x, y), _NUDGES[0], textcoords="offset points", fontsize=7, color=colour,
        )  # fmt: skip
        best: tuple[float, tuple[int, int]] | None = None
        for nudge in _NUDGES:
            _nudge(label, nudge)
            here = label.get_window_extent()  # the slow part of this function
            covered = sum(_area(here, other) for other in taken)
            if best is None or covered < best[0]:
                best = covered, nudge
        assert best is not None
        _nudge(label, best[1])
        taken.append(label.get_window_extent())


def _nudge(label: Any, nudge: tuple[int, int]) -> None:
    """Move a label by `nudge` points right of and above its point, aligned to that side."""
    label.set_position(nudge)
    label.set_horizontalalignment("left" if nudge[0] > 0 else "right")
    label.set_verticalalignment("bottom" if nudge[1] > 0 else "top")


def _area(one: Bbox, other: Bbox) -> float:
    """Return the area in pixels that both cover."""
    both = Bbox.intersection(one, other)
    return 0.0 if both is None else float(both.width * both.height)
