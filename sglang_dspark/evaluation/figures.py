"""Draw the figures of the drafter analyses from their results; each analysis draws its own.

The same result always gives the same file, bitwise.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses import registry
from sglang_dspark.evaluation.analyses.analysis import Result

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


def caption(result: Result) -> str:
    """Describe in one line the figure of this result: its caption, target, decoding and remarks."""
    temperature = result.settings["temperature"]
    decoding = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    said = [result.target, decoding, *result.remarks()]
    return f"{registry.of(result).caption} ({', '.join(said)})"


def draw(result: Result) -> Figure:
    """Draw the figure of one result."""
    with mpl.rc_context(_STYLE):
        figure = registry.of(result).draw(result)
        figure.suptitle(caption(result), fontsize=10, x=0.01, ha="left", wrap=True)
        figure.draw_without_rendering()  # lay out once, not again for each format
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
