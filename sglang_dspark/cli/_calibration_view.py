"""Print calibration tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from sglang_dspark.evaluation.analyses.reliability import TITLES
from sglang_dspark.schedule.calibration import GRID_HIGH, GRID_LOW, Calibration


def show_tables(console: Console, tables: Mapping[str, Calibration], prompts: int) -> None:
    """Print temperatures and shifts, and the positions with a temperature at the grid's end."""
    console.print(f"fitted on {prompts} prompts:", highlight=False)
    for name, table in tables.items():
        scales = ", ".join(f"{t:.2f}" for t in table.temperatures)
        line = f"  {TITLES[name]}: temperatures {scales}"
        if any(table.shifts):
            line += f", shifts {', '.join(f'{s:+.2f}' for s in table.shifts)}"
        if table.spread:
            line += f", requests' own shifts of variance {table.spread:.2f}"
        console.print(line, highlight=False, soft_wrap=True)
    edge = [
        str(k)
        for k, t in enumerate(tables["after"].temperatures, 1)
        if not GRID_LOW < t < GRID_HIGH
    ]
    if edge:
        console.print(
            f"STS ran into the end of its grid at position {', '.join(edge)}: the error there is "
            "not one of temperature; compare the Brier scores before using this table",
            style="yellow",
        )
