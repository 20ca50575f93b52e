"""Figures of a sweep's report: matplotlib, as PNG files and as SVG inside of the page.

An arm has the same colour and marker in every figure (`report.data`). Intervals are those of
`summary.json`: 95%, paired over trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.report.data import Run, pooled, survival, verified_drafts
from sglang_dspark.loadtest.report.svg import GRID, INK, inline, label_points, tip
from sglang_dspark.loadtest.report.timeline import draw_timeline
from sglang_dspark.loadtest.sweep.run_dir import Interval, Level, Loop, MatchedSummary

_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": GRID,
    "legend.frameon": False,
    "svg.hashsalt": "sglang-dspark",
    "svg.fonttype": "none",
    "savefig.dpi": 160,
}


@dataclass(frozen=True)
class Drawn:
    """A figure with its heading and caption. stem: of its PNG, and its anchor."""

    stem: str
    title: str
    caption: str
    figure: Figure


def draw_all(run: Run) -> list[Drawn]:
    """Draw all figures that the run has data for, in the order of the page."""
    drawers: tuple[Callable[[Run], Drawn | None], ...] = (
        _frontier,
        _matched,
        _concurrency,
        _open_loop,
        _acceptance,
        draw_timeline_figure,
    )
    with mpl.rc_context(_STYLE):
        found = [drawn for draw in drawers if (drawn := draw(run)) is not None]
        for drawn in found:
            _headed(drawn.figure, run)
            drawn.figure.draw_without_rendering()  # lays out once, for both formats
            drawn.figure.set_layout_engine("none")
    return found


def _headed(figure: Figure, run: Run) -> None:
    """Put the run's label above the figure; call this before the layout."""
    if run.label:
        figure.suptitle(run.label, fontsize=9)


def save_png(drawn: Drawn, folder: Path) -> Path:
    """Write `folder`/stem.png, on white. Raises DSparkError if it cannot be written."""
    path = folder / f"{drawn.stem}.png"
    try:
        with replacing(path) as temporary, mpl.rc_context(_STYLE):
            drawn.figure.savefig(temporary, format="png", metadata={"Software": None})
    except OSError as error:
        raise DSparkError(f"cannot write the figure {path}: {error.strerror}") from error
    return path


def inline_svg(drawn: Drawn) -> str:
    """Return the figure as an SVG element of the page."""
    with mpl.rc_context(_STYLE):
        return inline(drawn.figure, drawn.stem)


def _frontier(run: Run) -> Drawn:
    figure, (axes,) = _panels(1, 7.6, 4.2)
    labels = []
    for name in run.arms:
        levels = run.levels(name, "closed")
        if not levels:
            continue
        x, y = _middles(levels, "speed_p50"), _middles(levels, "tokens_per_s")
        axes.errorbar(
            x, y, _errors(levels, "tokens_per_s"), _errors(levels, "speed_p50"),
            fmt=run.marker(name) + "-", color=run.colour(name), label=name, ms=5, lw=1.3,
            capsize=2, elinewidth=1,
        )  # fmt: skip
        for level, a, b in zip(levels, x, y, strict=True):
            if not level.on_frontier:
                axes.plot([a], [b], run.marker(name), ms=5, mfc="white", mec=run.colour(name))
            if np.isfinite(a):
                labels.append((a, b, f"{level.level:g}", run.colour(name)))
                tip(axes, a, b, f"{_place(level)}: {b:.1f} tokens/s in all, {a:.1f} a user")
    _sla_lines(run, axes)
    axes.set_xlabel("tokens/s/user (median)")
    axes.set_ylabel("tokens/s of all users")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best", fontsize=8)
    _headed(figure, run)
    label_points(figure, axes, labels)
    caption = (
        "Each point is an arm at one number of users (the small figure), closed loop; up is more "
        "throughput, right is more speed for each user, so the curve furthest to the upper right "
        "wins. Compare two curves along a horizontal line: that is speed at matched throughput. "
        "Bars are 95% intervals over trials; hollow points are beaten by another point of their "
        "own arm."
    )
    if run.summary.slas:
        caption += " Vertical lines are the speed floors of the service levels (dashed: slowest "
        caption += "tenth of users): what lies to their right holds them."
    return Drawn("frontier", "Throughput against speed per user", caption, figure)


def _sla_lines(run: Run, axes: Axes) -> None:
    """Draw the speed floors, each named once along its line."""
    names: dict[float, list[str]] = {}
    for sla in run.summary.slas:
        for floor, style, name in ((sla.speed_p50, "-", "p50"), (sla.speed_p10, "--", "p10")):
            if floor is not None:
                axes.axvline(floor, color=INK, lw=1, ls=style)
                names.setdefault(floor, []).append(name)
    for floor, found in names.items():
        axes.annotate(
            f"SLA {', '.join(dict.fromkeys(found))} {floor:g}", (floor, 0), (2, 4), fontsize=7,
            color=INK, rotation=90, xycoords=("data", "axes fraction"),
            textcoords="offset points",
        )  # fmt: skip


def _matched(run: Run) -> Drawn | None:
    comparisons = [each for each in run.summary.matched if each.levels]
    comparisons = [each for each in comparisons if each.over == comparisons[0].over]
    if not comparisons:
        return None
    rows = [len(each.levels) + (each.mid is not None) for each in comparisons]
    figure = Figure(figsize=(7.6, 0.6 + sum(0.62 + 0.26 * n for n in rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=[n + 0.5 for n in rows])
    for axes, each in zip(panels[:, 0], comparisons, strict=True):
        _matched_panel(axes, run, each)
    panels[-1, 0].set_xlabel("speed per user, ratio (each panel has its own scale)")
    caption = (
        "How much faster each user is served when both arms deliver the same tokens/s in total "
        "(the level on the left). Right of 1 the first-named arm is faster; a bar that crosses 1 "
        "names no winner. The diamond is the geometric mean over the levels. No bar: fewer than "
        "three trials, so no interval can be taken. The table has the other pairs of arms."
    )
    return Drawn("matched", "Speed per user at matched throughput", caption, figure)


def _matched_panel(axes: Axes, run: Run, pair: MatchedSummary) -> None:
    """Draw one pair of arms; the ratios form a column on the right, where nothing crosses them."""
    points = [(f"{p.tokens_per_s:.0f} tok/s", p.low, p.mid, p.high) for p in pair.levels]
    if pair.mid is not None:
        points.append(("all levels", pair.low, pair.mid, pair.high))
    for row, (label, low, mid, high) in enumerate(points):
        whole = label == "all levels"
        reach, bounds = None, ""
        if low is not None and high is not None:
            reach, bounds = [[mid - low], [high - mid]], f" ({low:.2f} to {high:.2f})"
        axes.errorbar(
            [mid], [row], xerr=reach,
            fmt="D" if whole else "o", capsize=3, color=run.colour(pair.over),
            ms=7 if whole else 5, lw=2 if whole else 1,
        )  # fmt: skip
        axes.annotate(f"{mid:.2f}x", (1.02, row), xycoords=("axes fraction", "data"),
                      fontsize=8, va="center", annotation_clip=False)  # fmt: skip
        tip(axes, mid, row, f"{pair.over} / {pair.under}, {label}: {mid:.2f}x{bounds}")
    axes.axvline(1, color=INK, lw=1)
    axes.set_title(f"{pair.over} / {pair.under}", loc="left")
    axes.set_yticks(range(len(points)), [label for label, *_ in points])
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def _draw_arm(
    panels: Sequence[Axes],
    run: Run,
    name: str,
    levels: Sequence[Level],
    field: str,
    beside: Sequence[float],
) -> None:
    """Draw an arm's figure with its interval by load on the left, and `beside` on the right."""
    x = [level.level for level in levels]
    style: dict[str, Any] = {"color": run.colour(name), "label": name, "ms": 5, "lw": 1.3}
    panels[0].errorbar(
        x, _middles(levels, field), _errors(levels, field),
        fmt=run.marker(name) + "-", capsize=2, elinewidth=1, **style,
    )  # fmt: skip
    panels[1].plot(x, beside, run.marker(name) + "-", **style)
    for axes, values in ((panels[0], _middles(levels, field)), (panels[1], beside)):
        for level, value in zip(levels, values, strict=True):
            if np.isfinite(value):
                tip(axes, level.level, value, f"{_place(level)}: {value:.3g}")


def _concurrency(run: Run) -> Drawn:
    figure, panels = _panels(2, 9.4, 3.6)
    for name in run.arms:
        levels = run.levels(name, "closed")
        if not levels:
            continue
        lengths = [np.nan if e.verify_length is None else e.verify_length for e in levels]
        _draw_arm(panels, run, name, levels, "tokens_per_s", lengths)
    for axes in panels:
        _log_users(axes, run)
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("tokens/s of all users")
    panels[1].set_ylabel("drafts verified a step and request")
    _legend(figure, panels[0])
    caption = (
        "Left: total throughput against the number of users; an arm below the grey curve (plain "
        "decoding) is slower at that load. Right: mean verify length, the drafts that the target "
        "checks in a step for each request. Fixed arms verify the same at any load; a scheduled "
        "arm should verify less as users are added and a pass gets slower."
    )
    return Drawn("concurrency", "Throughput and verify length under load", caption, figure)


def _open_loop(run: Run) -> Drawn | None:
    bursts = {burst.level for burst in run.summary.bursts}  # not steady: in a table of their own
    by_arm = {
        name: [level for level in run.levels(name, "open") if level.level not in bursts]
        for name in run.arms
    }
    if not any(by_arm.values()):
        return None
    figure, panels = _panels(2, 9.4, 3.6)
    for name, levels in by_arm.items():
        if not levels:
            continue
        late = [np.nan if e.ttft_p95 is None else e.ttft_p95 for e in levels]
        _draw_arm(panels, run, name, levels, "speed_p50", late)
    for axes in panels:
        axes.set_xlabel("requests/s offered")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("tokens/s/user (median)")
    panels[1].set_ylabel("time to first token, p95, s")
    _legend(figure, panels[0])
    caption = (
        "Requests arrive at set times and do not wait for answers. Left: speed each user sees "
        "(higher is better). Right: waiting for the first token, counted from the scheduled "
        "arrival (lower is better); where a curve bends up the arm no longer keeps pace."
    )
    return Drawn("open-loop", "Open loop: when users do not wait", caption, figure)


def _acceptance(run: Run) -> Drawn | None:
    arms = [a for a in run.arms if any(sum(c.histogram) for c in run.good(a)) and run.arm(a).gamma]
    if not arms:
        return None
    domains = sorted({d for a in arms for c in run.good(a) for d in c.domains})
    figure, panels = _panels(len(domains) + 1, 2.1 * (len(domains) + 1) + 0.9, 3.2)
    for name in arms:
        _positions(run, panels[0], name, _of_verified(run, name), "of those verified")
    panels[0].set_title("of drafts verified")
    panels[0].set_ylabel("drafts accepted, share")
    for axes, domain in zip(panels[1:], domains, strict=True):
        for name in arms:
            cells = [cell for cell in run.good(name) if domain in cell.domains]
            histogram = pooled(cell.domains[domain].histogram for cell in cells)
            if sum(histogram):
                share = survival(histogram, run.arm(name).gamma)
                _positions(run, axes, name, share, f"of all steps, {domain}")
        axes.set_title(f"of all steps: {domain}")
    for axes in panels:
        axes.set_ylim(0, 1)
    _legend(figure, panels[0])
    caption = (
        "How far the target agrees with the drafter. First panel: of the drafts that were verified "
        "at position k, the share accepted; the flatter and higher, the better confidence chose "
        "what to verify. Others: the share of all verify steps in which drafts 1 to k were "
        "accepted, by kind of prompt; there a scheduled arm lies lower because it leaves doubtful "
        "drafts out, or does not draft at all."
    )
    return Drawn("acceptance", "Acceptance by position", caption, figure)


def _of_verified(run: Run, name: str) -> list[float]:
    """Return accepted over verified drafts at each position; NaN if none was verified."""
    found = verified_drafts(run, name)
    if found is None:
        return []
    pairs = zip(found.accepted, found.admitted, strict=True)
    return [a / b if b else np.nan for a, b in pairs]


def draw_timeline_figure(run: Run) -> Drawn | None:
    """Draw the timeline; None if no arm recorded one."""
    found = draw_timeline(run)
    if found is None:
        return None
    figure, caption = found
    return Drawn("timeline", "What the scheduler did, second by second", caption, figure)


def _positions(run: Run, axes: Axes, name: str, share: Sequence[float], of: str) -> None:
    k = np.arange(1, len(share) + 1)
    for at, value in zip(k, share, strict=True):
        if np.isfinite(value):
            tip(axes, float(at), value, f"{name}, position {at}: {value:.0%} {of}")
    axes.plot(k, share, run.marker(name) + "-", color=run.colour(name), label=name, ms=4, lw=1.3)
    axes.set_xlabel("position k")
    axes.set_xticks(np.arange(1, max(len(share), round(axes.get_xlim()[1])) + 1))


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5))


def _log_users(axes: Axes, run: Run, loop: Loop = "closed") -> None:
    users = sorted({cell.level for cell in run.good(loop=loop)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(users)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("users at a time")


def _place(level: Level) -> str:
    """Return arm and load of a point in words."""
    unit = "requests/s" if level.loop == "open" else "user" if level.level == 1 else "users"
    return f"{level.arm}, {level.level:g} {unit}"


def _interval(level: Level, what: str) -> Interval | None:
    found: Interval | None = getattr(level, what)
    return found


def _middles(levels: Sequence[Level], what: str) -> list[float]:
    """Return the geometric means, NaN if unknown."""
    found = [_interval(level, what) for level in levels]
    return [np.nan if each is None else each.mid for each in found]


def _errors(levels: Sequence[Level], what: str) -> np.ndarray:
    """Return the lengths of error bars [2, n], 0 without an interval."""
    rows = []
    for level in levels:
        each = _interval(level, what)
        if each is None or each.low is None or each.high is None:
            rows.append((0.0, 0.0))
        else:
            rows.append((max(0.0, each.mid - each.low), max(0.0, each.high - each.mid)))
    return np.array(rows).T
