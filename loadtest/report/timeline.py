"""The timeline of a cell: budget, skipped drafts and queue, from counters read while it ran.

Counters only grow; their growth between two readings gives the events in that time. The scheduler
exports its counts about once a second, so single points are rough; read the trend instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_dspark.loadtest.report.data import Run, policy_of
from sglang_dspark.loadtest.report.svg import INK
from sglang_dspark.loadtest.sweep.run_dir import Cell, Counters


@dataclass(frozen=True)
class Moment:
    """Rates between two readings; at: their middle, s. None if no step was counted."""

    at: float
    budget: float | None
    skipped: float | None
    tokens_per_s: float


def moments(readings: Sequence[Counters]) -> list[Moment]:
    """Compute the growth between neighbouring readings of a timeline."""
    found = []
    for before, after in pairwise(readings):
        seconds = after.at - before.at
        steps = after.budget_count - before.budget_count
        if seconds <= 0:
            continue
        skips = sum(after.skips.values()) - sum(before.skips.values())
        drafts = after.budget_sum - before.budget_sum
        found.append(
            Moment(
                at=(before.at + after.at) / 2,
                budget=drafts / steps if steps > 0 else None,
                skipped=skips / steps if steps > 0 else None,
                tokens_per_s=(after.generated - before.generated) / seconds,
            )
        )
    return found


def shown_cells(run: Run) -> list[Cell]:
    """Choose cells of the scheduled arm: lightest and heaviest closed load, heaviest open one."""
    arms = [arm.name for arm in run.info.arms if policy_of(arm) == "dspark"]
    found: list[Cell] = []
    for loop, places in (("closed", (0, -1)), ("open", (-1,))):
        cells = [c for c in run.cells if not c.void and c.loop == loop and c.arm in arms[:1]]
        cells = [c for c in cells if len(c.timeline) >= 2]
        levels = sorted({cell.level for cell in cells})
        for level in dict.fromkeys(levels[place] for place in places if levels):
            found.append(next(cell for cell in cells if cell.level == level))
    return found


def draw_timeline(run: Run) -> tuple[Figure, str] | None:
    """Draw the figure, return it with its caption; None if no scheduled arm has readings."""
    cells = shown_cells(run)
    if not cells:
        return None
    width = 1.2 + 2.9 * len(cells)
    figure = Figure(figsize=(max(width, 5.0), 6.0), layout="constrained")
    grid = figure.subplots(3, len(cells), sharex="col", sharey="row", squeeze=False)
    colour = run.colour(cells[0].arm)
    for column, cell in zip(grid.T, cells, strict=True):
        unit = "requests/s" if cell.loop == "open" else "user" if cell.level == 1 else "users"
        column[0].set_title(f"{cell.arm}, {cell.level:g} {unit}")
        _course(column, cell, colour)
        column[2].set_xlabel("s from the cell's start")
    for axes, label in zip(
        grid[:, 0], ("drafts admitted a step", "steps without a draft", "requests"), strict=True
    ):
        axes.set_ylabel(label)
    grid[0, 0].set_ylim(bottom=0)
    grid[1, 0].set_ylim(-0.03, 1.03)
    grid[2, 0].set_ylim(bottom=0)
    handles, labels = grid[2, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    caption = (
        "Top: K, the drafts that a step admits over all requests. Middle: share of steps that did "
        "not draft at all, because plain decoding was the better use of the time, or to probe it. "
        "Bottom: requests running, and waiting in the queue. Look for K falling and skips rising "
        "where many run at once, and for a queue that grows, which means overload."
    )
    return figure, caption


def _course(column: Sequence[Axes], cell: Cell, colour: str) -> None:
    ends = [[each] if each is not None else [] for each in (cell.before, cell.after)]
    course = moments([*ends[0], *cell.timeline, *ends[1]])
    at = [moment.at for moment in course]
    column[0].plot(at, [_nan(m.budget) for m in course], "o-", color=colour, ms=3, lw=1.3)
    column[1].plot(at, [_nan(m.skipped) for m in course], "o-", color=colour, ms=3, lw=1.3)
    when = [reading.at for reading in cell.timeline]
    running = [_nan(reading.running) for reading in cell.timeline]
    queued = [_nan(reading.queued) for reading in cell.timeline]
    column[2].step(when, running, where="post", lw=1.3, color=INK, label="running")
    column[2].step(when, queued, where="post", lw=1.3, color=INK, ls="--", label="queued")


def _nan(value: float | None) -> float:
    return np.nan if value is None else value
