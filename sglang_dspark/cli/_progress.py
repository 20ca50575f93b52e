"""Show progress: bars on a terminal, plain lines if output goes to a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

StageProgress = Callable[[str, int, int], None]
_PLAIN_EVERY_S = 10.0  # without a terminal, a long stage is mentioned this often


def bars(console: Console) -> Progress:
    """Create a Rich progress display in the package's one style."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def stages(console: Console) -> Iterator[StageProgress]:
    """Yield a callback (stage, done, total) shown as one bar per stage; total 0: unknown end."""
    if not console.is_terminal:
        yield _PlainStages(console)
        return
    display = bars(console)
    tasks: dict[str, TaskID] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            for earlier in tasks.values():
                display.update(earlier, visible=False)
            tasks[stage] = display.add_task(stage, total=total or None, count="")
        count = f"{done / total:4.0%}" if total else ""
        display.update(tasks[stage], completed=done, total=total or None, count=count)

    with display:
        yield show


@contextmanager
def says_when_stopped() -> Iterator[None]:
    """Answer Ctrl-C with one line and exit status 130, after the block has cleaned up."""
    try:
        yield
    except KeyboardInterrupt:
        print("\ndspark: stopped; no server is left running", file=sys.stderr)
        raise typer.Exit(130) from None


class _PlainStages:
    """Print one line when a stage begins, and one every few seconds while it lasts."""

    def __init__(self, console: Console):
        self._console = console
        self._stage = ""
        self._began = 0.0
        self._printed_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == self._stage and now - self._printed_at < _PLAIN_EVERY_S:
            return
        if stage != self._stage:
            self._stage, self._began = stage, now
            suffix = " ..."
        else:
            share = f"{done / total:.0%}, " if total else ""
            suffix = f": {share}{now - self._began:.0f} s"
        self._console.print(f"{stage}{suffix}", markup=False, highlight=False)
        self._printed_at = now
