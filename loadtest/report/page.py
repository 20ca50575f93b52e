"""Build `dspark report RUN`: a sweep as one self-contained HTML page, and its figures as PNG.

The page needs no network and no other file: figures are inline SVG, the interactive section is
computed in the browser by `page_model.js` and drawn by `page_view.js` from data in the page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.report import tables
from sglang_dspark.loadtest.report.data import (
    FITTED,
    POLICY_COLOURS,
    Run,
    model_of,
    policy_of,
    threshold_of,
)
from sglang_dspark.loadtest.report.figures import Drawn, draw_all, inline_svg, save_png
from sglang_dspark.loadtest.report.model_error import MISSED, ModelError, model_errors
from sglang_dspark.loadtest.report.page_model import MIX, LoadModel, levels
from sglang_dspark.loadtest.report.tables import Table
from sglang_dspark.loadtest.report.tiles import tiles
from sglang_dspark.loadtest.sweep.run_dir import Interval

_POLICY_NAMES = {
    "plain": "plain decoding",
    "fixed": "fixed length",
    "static": "static threshold",
    "algorithm1": "Algorithm 1 (early stop)",
    "dspark": "DSpark (global budget)",
}


@dataclass(frozen=True)
class Report:
    """html: the whole page; figures: those of the page, for `save_png`."""

    html: str
    figures: list[Drawn]


def make_report(folder: Path) -> Report:
    """Build the report of a sweep's folder. Raises DSparkError if it is none, or no cell counts."""
    run = Run.read(folder)
    figures = draw_all(run)
    page = {
        "title": _labelled(run, f"Load test: {run.info.name}"),
        "run": run,
        "tiles": tiles(run),
        "sections": [_section(run, drawn) for drawn in figures],
        "tables": _tables(run),
        "provenance": _provenance(run),
        "missed": MISSED,
        **_interactive(run),
        "style": Markup(_asset("report.css")),
        "scripts": Markup(_asset("page_model.js") + _asset("page_view.js")),
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return Report(environment.from_string(_asset("report.html.j2")).render(**page), figures)


def save_figures(report: Report, folder: Path) -> list[Path]:
    """Write all figures of a report as PNG files; return their paths."""
    return [save_png(drawn, folder) for drawn in report.figures]


def page_data(run: Run, model: LoadModel, errors: Sequence[ModelError]) -> dict[str, Any]:
    """Collect the data of the page's scripts: model, choices, measured points and model errors.

    An error, by policy and users, is the modelled throughput over the measured one, less 1.
    """
    by_policy: dict[str, dict[int, float]] = {each.policy: {} for each in errors}
    for each in errors:
        by_policy[each.policy][each.users] = each.error
    measured = [
        {
            "arm": name,
            "policy": policy_of(run.arm(name)),
            "colour": run.colour(name),
            "points": [
                {
                    "requests": round(level.level),
                    "tokens_per_s": _bounds(level.tokens_per_s),
                    "speed": _bounds(level.speed_p50),
                    "drafts": level.verify_length,
                }
                for level in run.levels(name, "closed")
            ],
        }
        for name in run.arms
    ]
    return {
        "model": model.as_json(),
        "levels": levels(model.most),
        "policies": [
            {"name": name, "label": label, "colour": POLICY_COLOURS[name]}
            for name, label in _POLICY_NAMES.items()
        ],
        "workloads": [MIX, *model.workloads],
        "errors": by_policy,
        "missed": MISSED,
        "threshold": threshold_of(run),
        "spread_told": "this run" if model.spread_from.startswith(FITTED) else "assumed",
        "measured": [each for each in measured if each["points"]],
    }


def _bounds(interval: Interval | None) -> dict[str, float | None] | None:
    """Return low, mid and high of an interval, without its single values."""
    if interval is None:
        return None
    return {"low": interval.low, "mid": interval.mid, "high": interval.high}


def _interactive(run: Run) -> dict[str, Any]:
    """Return the interactive section's data, or the reason why the run has none."""
    try:
        model = model_of(run)
    except DSparkError as error:
        return {"data": None, "check": None, "model": None, "missing": str(error)}
    errors = model_errors(run, model)
    text = json.dumps(page_data(run, model, errors), allow_nan=False, separators=(",", ":"))
    safe = text.replace("<", "\\u003c")  # no text of a run may end the script element
    check = next(iter(_present(run, [tables.model_check(errors)])), None)
    return {"data": Markup(safe), "check": check, "model": asdict(model), "missing": ""}


def _section(run: Run, drawn: Drawn) -> dict[str, Any]:
    below = {
        "matched": [tables.matched],
        "acceptance": [tables.verified, tables.acceptance, tables.accepted_positions],
    }
    found = [table(run) for table in below.get(drawn.stem, [])]
    return {
        "stem": drawn.stem,
        "title": _labelled(run, drawn.title),
        "caption": drawn.caption,
        "svg": Markup(inline_svg(drawn)),
        "tables": _present(run, found),
    }


def _tables(run: Run) -> list[Table]:
    found = [tables.hold(run), *tables.speeds(run), tables.ratios(run), *tables.capacities(run)]
    found += [*tables.bursts(run), *tables.latencies(run), tables.troubles(run)]
    return _present(run, found)


def _present(run: Run, found: Sequence[Table | None]) -> list[Table]:
    return [replace(t, title=_labelled(run, t.title)) for t in found if t is not None]


def _labelled(run: Run, title: str) -> str:
    return f"{title} ({run.label})" if run.label else title


def _provenance(run: Run) -> dict[str, Any]:
    info = run.info
    facts = {
        "command": " ".join(info.argv),
        "commit": info.commit,
        "device": info.device,
        **info.hardware,
        **info.versions,
        "cores": f"servers {info.cores.server or 'all'}, load generator "
        f"{info.cores.client or 'all'}, nice {info.cores.nice}: {info.cores.why}",
        "started": info.started,
        "ended": info.ended or "not complete",
        "cells": f"{len(run.cells)} of {len(info.plan)} cells measured, {len(run.good())} count",
    }
    return {
        "facts": facts,
        "arms": _present(run, [tables.tables_used(run)])[0],
        "commands": [(arm.name, arm.command, _pretty(arm.config)) for arm in info.arms],
        "config": _pretty(info.config),
    }


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
