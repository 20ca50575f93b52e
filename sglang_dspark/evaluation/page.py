"""The drafter report: every result file as figure and table in one self-contained HTML page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl

from sglang_dspark.common.files import load_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation import figures
from sglang_dspark.evaluation.reliability import VARIANTS

ORDER = (
    "tau",
    "positions",
    "depth",
    "length",
    "overhead",
    "thresholds",
    "roc",
    "reliability",
    "curves",
    "limits",
)


@dataclass(frozen=True)
class Result:
    """A result file of a drafter analysis: its stem and its content."""

    stem: str
    document: Mapping[str, Any]

    @property
    def metrics(self) -> Mapping[str, Any]:
        """What was measured."""
        return self.document["metrics"]


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def read_results(folder: Path) -> list[Result]:
    """All `drafters_*.json` of a folder, in the order of the paper's section 4.

    Raises DSparkError when there is none or one is not a result of a drafter analysis.
    """
    found = []
    for path in sorted(folder.glob("drafters_*.json")):
        with reading(path, "result of a drafter analysis", "measure again with `dspark eval`"):
            document = load_json(path)
            place = ORDER.index(document["metrics"]["analysis"])
        found.append((place, path.stem, document))
    if not found:
        raise DSparkError(
            f"no drafters_*.json in {folder}: measure first, e.g. with `dspark eval tau`"
        )
    found.sort(key=lambda each: each[:2])
    return [Result(stem, document) for _, stem, document in found]


def render(results: Sequence[Result], title: str) -> str:
    """The HTML page; it needs no network and no other file."""
    template = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    sections = [
        {
            "stem": result.stem,
            "caption": figures.caption(result.metrics),
            "figure": _svg(result.metrics),
            "tables": tables(result.metrics),
            **{key: result.document[key] for key in ("command", "commit", "device", "date")},
        }
        for result in results
    ]
    return environment.from_string(template).render(title=title, sections=sections)


def tables(metrics: Mapping[str, Any]) -> list[Table]:
    """The numbers behind a figure as text."""
    return _TABLES[metrics["analysis"]](metrics)


def drafter_summary(results: Sequence[Result]) -> dict[str, Any]:
    """`metrics` of drafters.json: what others read, gathered from the analyses that are there.

    Greedy results stand under the plain names, sampled ones under `NAME_sampled`. sequential_share
    is measured in the engine, by wall time, of the first drafter timed.
    """
    summary: dict[str, Any] = {"sources": [result.stem for result in results]}
    for result in results:
        metrics = result.metrics
        suffix = "" if metrics["settings"]["temperature"] == 0 else "_sampled"
        if metrics["analysis"] == "tau":
            for name in ("tau", "interval", "ratio"):
                summary[f"{name}{suffix}"] = metrics[name]
        elif metrics["analysis"] == "overhead":
            summary["sequential_share"] = metrics["drafters"][0]["engine"]["wall"]["share"]
        elif metrics["analysis"] == "reliability":
            groups = metrics["groups"]
            auc = groups["overall"]["before"]["auc"]
            summary[f"auc{suffix}"] = auc["pooled"]
            summary[f"auc_within_position{suffix}"] = auc["within"]
            for name in VARIANTS:
                known = {
                    g: part[name]["ece"]["value"] for g, part in groups.items() if name in part
                }
                if known:
                    summary[f"ece_{name}{suffix}"] = known
    return summary


def _svg(metrics: Mapping[str, Any]) -> str:
    """The figure as base64 text."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "sglang-dspark"}):
        figures.draw(metrics).savefig(buffer, format="svg", metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _tau_tables(metrics: Mapping[str, Any]) -> list[Table]:
    groups = list(next(iter(metrics["tau"].values())))
    rows = [
        [label, *(_interval(value[g], *metrics["interval"][label][g]) for g in groups)]
        for label, value in metrics["tau"].items()
    ]
    found = [Table(["tau", *groups], rows)]
    if metrics["ratio"]:
        ratio_rows = [
            [pair, *(_gain(ratios[group]) for group in groups)]
            for pair, ratios in metrics["ratio"].items()
        ]
        found.append(Table(["ratio of tau - 1, paired", *groups], ratio_rows))
    return found


def _position_tables(metrics: Mapping[str, Any]) -> list[Table]:
    found = []
    for key, name in (("curves", "given drafts 1..k-1"), ("cumulative", "drafts 1..k")):
        rows = [
            [label, group, *(_percent(point["value"]) for point in points)]
            for label, parts in metrics[key].items()
            for group, points in parts.items()
        ]
        width = max(len(row) for row in rows) - 2
        padded = [[*row, *[""] * (width + 2 - len(row))] for row in rows]
        head = [f"accepted, {name}", "domain", *(f"k = {k + 1}" for k in range(width))]
        found.append(Table(head, padded))
    return found


def _curve_tables(metrics: Mapping[str, Any]) -> list[Table]:
    points = [(label, p) for label, line in metrics["curves"].items() for p in line]
    groups = list(points[0][1]["tau"])
    rows = [
        [label, str(p["x"]), *(_interval(*_bounds(p["tau"][group])) for group in groups)]
        for label, p in points
    ]
    name = "layers" if metrics["analysis"] == "depth" else "gamma"
    return [Table(["drafter", name, *groups], rows)]


def _overhead_tables(metrics: Mapping[str, Any]) -> list[Table]:
    rows = []
    for each in metrics["drafters"]:
        for way in ("engine", "direct"):
            for clock in ("wall", "thread_cpu"):
                found = each[way][clock]
                cells = [f"{1e3 * found['round_s']:.2f}", f"{1e3 * found['loop_s']:.3f}"]
                share = f"{found['share']:.2%}"
                name = f"{way}, {clock.replace('_', ' ')}"
                rows.append([each["label"], str(each["gamma"]), name, *cells, share])
    return [Table(["drafter", "gamma", "measured", "round ms", "loop ms", "share"], rows)]


def _threshold_tables(metrics: Mapping[str, Any]) -> list[Table]:
    grid = metrics["thresholds"]
    chosen = [min(range(len(grid)), key=lambda i: abs(grid[i] - t)) for t in (0, 0.25, 0.5, 0.75)]
    rows = []
    for label, parts in metrics["curves"].items():
        for group, part in parts.items():
            cells = [
                f"{_percent(part['acceptance_rate'][i]['value'])}, "
                f"tau {part['tau'][i]['value']:.2f}"
                for i in chosen
            ]
            rows.append([label, group, *cells])
    return [Table(["drafter", "domain", *(f"t = {grid[i]:.2f}" for i in chosen)], rows)]


def _reliability_tables(metrics: Mapping[str, Any]) -> list[Table]:
    groups = metrics["groups"]
    variants = [name for name in VARIANTS if name in groups["overall"]]
    rows = []
    for group, part in groups.items():
        auc = part["before"]["auc"]
        rows.append(
            [
                group,
                str(part["steps"]),
                *(_share_interval(part[name]["ece"]) for name in variants),
                _percent(part[variants[-1]]["ece_floor"]),
                *(f"{part[name]['brier']:.4f}" for name in variants),
                *(_number(x) for x in (auc["pooled"], auc["within"], part["auc_conditional"])),
            ]
        )
    head = ["domain", "steps", *(f"ECE {name}" for name in variants), "ECE floor"]
    head += [f"Brier {name}" for name in variants]
    return [Table([*head, "AUC", "in position", "conditional"], rows)]


def _roc_tables(metrics: Mapping[str, Any]) -> list[Table]:
    rows = [
        [label, group, *(_number(part["auc"][k]) for k in ("pooled", "within", "conditional"))]
        for label, parts in metrics["groups"].items()
        for group, part in parts.items()
    ]
    return [Table(["drafter", "domain", "AUC", "in position", "conditional"], rows)]


def _training_tables(metrics: Mapping[str, Any]) -> list[Table]:
    runs = metrics["runs"]
    steps = sorted({point["step"] for run in runs.values() for point in run["points"]})
    shown = [step for step in steps if step % 500 == 0] or steps
    rows = []
    for label, run in runs.items():
        known = {point["step"]: point["held_out_tau"] for point in run["points"]}
        rows.append([label, str(run["layers"]), *(_number(known.get(step)) for step in shown)])
    return [Table(["held-out tau", "layers", *(f"step {step}" for step in shown)], rows)]


def _limit_tables(metrics: Mapping[str, Any]) -> list[Table]:
    groups = list(metrics["outside"])
    rows = [
        ["answer tokens outside", *(_share_interval(metrics["outside"][g]) for g in groups)],
        ["tau of a perfect drafter", *(_interval(*_bounds(metrics["ceiling"][g])) for g in groups)],
    ]
    for label, found in metrics["rejected_outside"].items():
        cells = (_share_interval(found[group]) for group in groups)
        rows.append([f"rejections outside, {label}", *cells])
    pairs = []
    for pair, found in metrics["same_anchors"].items():
        for side, name in zip(("ours", "theirs"), pair.split("/", 1), strict=True):
            chances = [_share_interval(each["macro"]) for each in found["cumulative"][side]]
            pairs.append([pair, str(found["anchors"]), name, *chances])
    tables = [Table(["vocabulary", *groups], rows)]
    if pairs:
        width = max(map(len, pairs)) - 3
        head = [
            "pair",
            "common anchors",
            "drafts 1..k accepted by",
            *(f"{k + 1}" for k in range(width)),
        ]
        tables.append(Table(head, [[*row, *[""] * (width + 3 - len(row))] for row in pairs]))
        tables.append(_first_draft_table(metrics["first_draft"]))
    return tables


def _first_draft_table(pairs: Mapping[str, Any]) -> Table:
    """Ratio of tau - 1 by the chance of the first draft: both scaled, and ours alone changed."""
    rows = []
    for pair, found in pairs.items():
        for rule, name in (("scaled", "both scaled"), ("alone", "ours alone")):
            gains = (f"{100 * (row[rule] - 1):+.0f}%" for row in found["ratio"])
            needed = (_number(each[rule]) for each in found["needed"].values())
            rows.append([pair, name, *gains, *needed])
    one = next(iter(pairs.values()))
    firsts = [f"k = 1 at {row['first']:g}" for row in one["ratio"]]
    wanted = [f"needed for +{100 * (float(gain) - 1):.0f}%" for gain in one["needed"]]
    return Table(["ratio of tau - 1, arithmetic", "changed", *firsts, *wanted], rows)


def _bounds(found: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return found["value"], found["low"], found["high"]


def _interval(value: float, low: float, high: float) -> str:
    return f"{value:.3f} ({low:.2f}-{high:.2f})"


def _share_interval(found: Mapping[str, Any]) -> str:
    return f"{found['value']:.1%} ({found['low']:.1%}-{found['high']:.1%})"


def _gain(found: Mapping[str, Any]) -> str:
    value, low, high = (100 * (x - 1) for x in _bounds(found))
    return f"{value:+.1f}% ({low:+.1f} to {high:+.1f})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


_TABLES: dict[str, Callable[[Mapping[str, Any]], list[Table]]] = {
    "tau": _tau_tables,
    "positions": _position_tables,
    "depth": _curve_tables,
    "length": _curve_tables,
    "overhead": _overhead_tables,
    "thresholds": _threshold_tables,
    "roc": _roc_tables,
    "reliability": _reliability_tables,
    "curves": _training_tables,
    "limits": _limit_tables,
}
