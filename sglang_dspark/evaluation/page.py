"""Render the drafter report: all results as figures and tables in one self-contained HTML page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl

from sglang_dspark.common.files import load_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation import figures
from sglang_dspark.evaluation.analyses import registry
from sglang_dspark.evaluation.analyses.analysis import Result


@dataclass(frozen=True)
class Published:
    """A result file of a drafter analysis: its stem, its whole document, and the result in it."""

    stem: str
    document: Mapping[str, Any]
    result: Result


def read_results(folder: Path) -> list[Published]:
    """Read all `drafters_*.json` of a folder, in the order of the paper's section 4.

    Raises DSparkError if there are no files, or one is not a result of a drafter analysis.
    """
    order = list(registry.ANALYSES)
    found = []
    for path in sorted(folder.glob("drafters_*.json")):
        with reading(path, "result of a drafter analysis", "measure again with `dspark eval`"):
            document = load_json(path)
            result = registry.read(document["metrics"])
        found.append(Published(path.stem, document, result))
    if not found:
        raise DSparkError(
            f"no drafters_*.json in {folder}: measure first, e.g. with `dspark eval tau`"
        )
    return sorted(found, key=lambda each: (order.index(each.result.analysis), each.stem))


def render(results: Sequence[Published], title: str) -> str:
    """Render the HTML page; it needs no network and no other file."""
    template = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    sections = [
        {
            "stem": each.stem,
            "caption": figures.caption(each.result),
            "figure": _svg(each.result),
            "tables": registry.of(each.result).page_tables(each.result),
            **{key: each.document[key] for key in ("command", "commit", "device", "date")},
        }
        for each in results
    ]
    return environment.from_string(template).render(title=title, sections=sections)


def drafter_summary(results: Sequence[Published]) -> dict[str, Any]:
    """Return the `metrics` of drafters.json, which other tools read, from the analyses present.

    Greedy results have the plain names, sampled ones `NAME_sampled`.
    """
    found: dict[str, Any] = {"sources": [each.stem for each in results]}
    for each in results:
        summary = registry.of(each.result).summary
        if summary is not None:
            suffix = "_sampled" if each.result.sampled else ""
            found |= {f"{k}{suffix}": value for k, value in summary(each.result).items()}
    return found


def _svg(result: Result) -> str:
    """Return the figure as SVG in base64 text."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "sglang-dspark"}):
        figures.draw(result).savefig(buffer, format="svg", metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode("ascii")
