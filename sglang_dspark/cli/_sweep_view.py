"""Show the output of `dspark sweep`: the plan, a line for each cell with the time left, results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

if TYPE_CHECKING:
    from sglang_dspark.loadtest.sweep.config import SweepConfig
    from sglang_dspark.loadtest.sweep.plan import Load, PlannedCell
    from sglang_dspark.loadtest.sweep.run_dir import Cell, Summary

_STARTING_EVERY_S = 10.0


class SweepView:
    """Progress of a sweep. Bars on a terminal, lines elsewhere; a line for each cell on both."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._expected: dict[str, float] = {}
        self._done: set[str] = set()
        self._spent = self._planned = 0.0
        self._began: dict[str, float] = {}
        self._now = ""
        self._warned: set[tuple[str, str]] = set()  # by arm and kind
        self._said_at = 0.0

    @contextmanager
    def live(self) -> Iterator[SweepView]:
        """Show the bar during the block, if the console is a terminal."""
        if not self.console.is_terminal:
            yield self
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[left]}"),
        )
        with Progress(*columns, console=self.console, transient=True) as self._bar:
            self._bar.add_task("starting", total=None, left="")
            yield self

    def planned(
        self, loads: Sequence[Load], cells: Sequence[PlannedCell], kept: Sequence[str]
    ) -> None:
        """Print the cells to measure; `kept` are measured already."""
        from sglang_dspark.loadtest.sweep.plan import CELL_OVERHEAD_S

        self._expected = {cell.name: cell.load.expected_s + CELL_OVERHEAD_S for cell in cells}
        self._done = set(kept)
        if loads:
            self.console.print(_loads_table(loads))
            self._line(f"about {self.left()} minutes when all arms are as fast as the baseline")
        if kept:
            self._line(f"{len(self._done)} of {len(cells)} cells are there already")

    def starting(self, arm: str, seconds: float) -> None:
        """Show that a server is starting."""
        now = time.monotonic()
        self._describe(f"starting {arm} ({seconds:.0f} s)")
        if self._bar is None and (seconds < 0.5 or now - self._said_at > _STARTING_EVERY_S):
            self._line(f"starting the {arm} server: {seconds:.0f} s")
            self._said_at = now

    def measuring(self, what: str, arm: str) -> None:
        """Show that a cell, a pilot or a warm-up begins."""
        self._began[what] = time.monotonic()
        self._now = what if what.startswith(arm) else f"{arm}: {what}"
        self._describe(self._now)
        if what not in self._expected and self._bar is None:
            self._line(self._now)

    def measured(self, cell: Cell) -> None:
        """Print one line for a measured cell, with the time left at the pace so far."""
        self._done.add(cell.name)
        self._spent += time.monotonic() - self._began.get(cell.name, time.monotonic())
        self._planned += self._expected.get(cell.name, 0.0)
        unit = "requests/s" if cell.loop == "open" else "user" if cell.level == 1 else "users"
        place = f"{cell.arm}, {cell.level:g} {unit}, trial {cell.trial + 1}"
        if cell.void:
            figures = f"void: {cell.void}"
        else:
            figures = f"{cell.tokens_per_s or 0:.1f} tokens/s"
            figures += "" if cell.speed.p50 is None else f", {cell.speed.p50:.1f} per user"
            figures += f", tau {cell.tau:.2f}" if cell.tau is not None else ""
        if cell.repeats:
            figures += f", {cell.repeats} of {cell.requests} prompts sent before"
        count = f"[{len(self._done)}/{max(len(self._expected), len(self._done))}]"
        self._line(f"{count} {place}: {figures} (left: {self.left()})")
        for line in (*self._new_warnings(cell), *cell.log_tail.splitlines()):
            self._line(f"    {line}")

    def _new_warnings(self, cell: Cell) -> list[str]:
        """Return the cell's warnings of kinds that this arm did not have before."""
        new = {
            kind: line
            for kind, line in cell.warnings.items()
            if (cell.arm, kind) not in self._warned
        }
        self._warned |= {(cell.arm, kind) for kind in new}
        return list(new.values())

    def troubled(self, arm: str, said: str) -> None:
        """Print that a cell could not be measured."""
        self._line(f"{arm}: {said}")

    def polled(self) -> None:
        """Update the time left."""
        self._describe(self._now)

    def left(self) -> str:
        """Return the time of the remaining cells, at the pace of those measured."""
        pace = self._spent / self._planned if self._planned else 1.0
        seconds = pace * sum(t for name, t in self._expected.items() if name not in self._done)
        return duration(seconds)

    def _describe(self, what: str) -> None:
        if self._bar is not None:
            total = len(self._expected) or None
            left = f"{len(self._done)}/{total}, {self.left()} left" if total else ""
            task = self._bar.task_ids[0]
            self._bar.update(
                task, description=escape(what), total=total, completed=len(self._done), left=left
            )

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def show_config(console: Console, config: SweepConfig, cells: int, seconds: float) -> None:
    """Print the plan and its estimated time, before anything starts."""
    from sglang_dspark.loadtest.sweep.holding import said_limits

    loads = [f"{users} users" for users in config.concurrency]
    loads += [f"{config.open.kind} at {share:.0%} of capacity" for share in config.open.load]
    loads += [f"{given.get('kind', '?')} arrivals" for given in config.open.arrivals]
    if (burst := config.open.burst) is not None:
        loads.append(f"a burst of {burst.factor:g} times {burst.load:.0%} for {burst.burst_s:g} s")
    if (trace := config.open.trace) is not None:
        loads.append(f"the trace {trace.file.name}")
    if (hold := config.hold) is not None:
        what = said_limits(hold.p95_ttft_ms, hold.p95_tpot_ms)
        loads.append(f"up to {hold.probes} arrival rates an arm, to hold {what}")
    for line in (
        f"arms: {', '.join(config.names)}",
        f"loads: {', '.join(loads)}",
        f"prompts: {config.mix}; answers of {config.answer_tokens.low} to "
        f"{config.answer_tokens.high} tokens; {config.trials} trials; {cells} cells",
        f"about {duration(seconds)} minutes with the start of the servers",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _loads_table(loads: Sequence[Load]) -> Table:
    """Tabulate the sizes of the cells, from the pilot."""
    from sglang_dspark.loadtest.sweep.plan import describe

    table = Table(title="Cells, sized by the pilot", box=box.SIMPLE_HEAD)
    for name in ("load", "requests", "seconds"):
        table.add_column(name, justify="right")
    for row in describe(loads):
        table.add_row(*row)
    return table


def results_table(summary: Summary) -> Table:
    """Tabulate every arm at every load: means over the trials, with intervals of the throughput."""
    table = Table(
        title="Means over the trials" + (f" ({summary.label})" if summary.label else ""),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    bounded = any(row.tokens_per_s and row.tokens_per_s.low for row in summary.levels)
    table.add_column("load", justify="right", no_wrap=True)
    table.add_column("arm", overflow="fold")  # a narrow terminal may wrap this one
    names = ("tokens/s", *["95%"] * bounded, "per\nuser", "TTFT\np95", "tau", "verified")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    order = sorted(summary.levels, key=lambda row: (row.loop, row.level))
    before = ""
    for row in order:
        unit = "req/s" if row.loop == "open" else "user" if row.level == 1 else "users"
        load = f"{row.level:g} {unit}"
        speed, user = row.tokens_per_s, row.speed_p50
        interval = ""
        if speed is not None and speed.low is not None and speed.high is not None:
            interval = f"{speed.low:.1f}-{speed.high:.1f}"
        table.add_row(
            load if load != before else "",
            row.arm,
            _shown(None if speed is None else speed.mid),
            *[interval] * bounded,
            _shown(None if user is None else user.mid),
            f"{1e3 * row.ttft_p95:.0f} ms" if row.ttft_p95 is not None else "-",
            _shown(row.tau, 2),
            _shown(row.verify_length, 2),
        )
        before = load
    return table


def burst_tables(summary: Summary) -> list[Table]:
    """Tabulate, for every burst, each arm's latencies before, in and after it."""
    found = []
    for burst in summary.bursts:
        table = Table(title=f"A burst, p99 (mean rate {burst.level:g} req/s)", box=box.SIMPLE_HEAD)
        for name in ("arm", "phase"):
            table.add_column(name)
        for name in ("requests", "answered", "TTFT ms", "TPOT ms", "whole ms"):
            table.add_column(name, justify="right", no_wrap=True)
        for arm in burst.arms:
            for number, phase in enumerate(arm.phases):
                times = (phase.ttft_p99, phase.tpot_p99, phase.e2e_p99)
                shown = [_shown(None if t is None else 1e3 * t, 0) for t in times]
                counts = (str(phase.requests), str(phase.ok))
                table.add_row("" if number else arm.arm, phase.name, *counts, *shown)
        found.append(table)
    return found


def _shown(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
