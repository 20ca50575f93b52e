"""`dspark report --records`: count the records of load-generating processes together."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_dspark.loadtest.client.measure import Measurement, Spread, measure_cell, merge
from sglang_dspark.loadtest.client.records_file import SUFFIX, read_records


def show_records(console: Console, folder: Path) -> None:
    """Print the figures of all `records-*.parquet` of a folder, each request counted once.

    Raises DSparkError if a worker's file is missing or two are of different loads.
    """
    files = [read_records(path) for path in sorted(folder.glob(f"records-*{SUFFIX}"))]
    header, records = merge(files)
    console.print(_table(measure_cell(header, records, None), header.workers))


def _table(found: Measurement, workers: int) -> Table:
    many = "one worker" if workers == 1 else f"{workers} workers"
    table = Table(title=f"{found.requests} requests of {many}", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("mean", "p50", "p95", "p99"):
        table.add_column(name, justify="right")
    rows: dict[str, tuple[Spread, float]] = {
        "first token, ms": (found.ttft, 1e3),
        "per token, ms": (found.tpot, 1e3),
        "whole answer, s": (found.seconds, 1.0),
        "tokens/s of a user": (found.user_speed, 1.0),
    }
    for name, (spread, unit) in rows.items():
        values = (spread.mean, spread.p50, spread.p95, spread.p99)
        table.add_row(name, *(f"{unit * value:.1f}" for value in values))
    missed = "".join(f", {count} {name}" for name, count in found.failures.items())
    table.caption = (
        f"{found.ok} answered{missed}; {found.tokens} tokens, {found.tokens_per_s:.1f} tokens/s; "
        f"client late by {found.lag_ms:.1f} ms at p99"
    )
    return table
