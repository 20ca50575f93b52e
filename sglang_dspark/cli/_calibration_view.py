"""Reliability numbers and calibration tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_dspark.schedule.calibration import GRID_HIGH, GRID_LOW, Calibration

_TITLES = {
    "before": "raw",
    "after": "STS",
    "shifted": "STS+shift",
    "followed": "STS+shift, followed",
}


_SHORT = {"before": "raw", "after": "STS", "shifted": "+shift", "followed": "own"}


def show_reliability(console: Console, title: str, parts: Mapping[str, Any]) -> None:
    """Print ECE of each calibration, its noise floor, and the readings of ROC-AUC."""
    variants = [name for name in _TITLES if name in next(iter(parts.values()))]
    table = Table(
        title=title, caption="floor: what perfect calibration would show on this much data"
    )
    table.add_column("domain")
    names = ["steps", *(f"ECE {_SHORT[name]}" for name in variants), "floor"]
    for name in [*names, "AUC pooled", "AUC in position"]:
        table.add_column(name, justify="right")
    for group, part in parts.items():
        cells = [f"{part[name]['ece']['value']:.1%}" for name in variants]
        cells.append(f"{part[variants[-1]]['ece_floor']:.1%}")
        auc = part["before"]["auc"]
        cells += [f"{auc['pooled']:.3f}", f"{auc['within']:.3f}"]
        table.add_row(group, str(part["steps"]), *cells)
    console.print(table)
    overall = parts["overall"]
    for name in variants:
        found, auc = overall[name], overall[name]["auc"]
        console.print(
            f"{_TITLES[name]}: ECE {found['ece']['value']:.2%} "
            f"({found['ece']['low']:.2%} to {found['ece']['high']:.2%}), "
            f"debiased {found['ece_debiased']:.2%}, "
            f"Brier {found['brier']:.4f}, AUC {auc['pooled']:.3f}, in position {auc['within']:.3f}",
            highlight=False,
        )


def show_tables(console: Console, tables: Mapping[str, Calibration], prompts: int) -> None:
    """Print temperatures and shift, and where a temperature ran into the end of the grid."""
    console.print(f"fitted on {prompts} prompts:", highlight=False)
    for name, table in tables.items():
        scales = ", ".join(f"{t:.2f}" for t in table.temperatures)
        line = f"  {_TITLES[name]}: temperatures {scales}"
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
