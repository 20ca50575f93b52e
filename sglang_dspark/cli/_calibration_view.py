"""Reliability numbers on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def show_reliability(console: Console, title: str, parts: Mapping[str, Any]) -> None:
    """Print ECE before and after, its noise floor, and the three readings of ROC-AUC."""
    table = Table(title=title, caption="floor: ECE of perfect calibration on this much data")
    names = [
        "steps",
        "ECE before",
        "ECE after",
        "floor",
        "AUC pooled",
        "in position",
        "conditional",
    ]
    table.add_column("domain")
    for name in names:
        table.add_column(name, justify="right")
    for group, part in parts.items():
        before, after = part["before"], part.get("after")
        shown = after or before
        floor = shown["ece_floor"]
        auc = before["auc"]
        table.add_row(
            group,
            str(part["steps"]),
            _ece(before["ece"]),
            "-" if after is None else _ece(after["ece"]),
            "-" if floor is None else f"{floor:.1%}",
            f"{auc['pooled']:.3f}",
            f"{auc['within']:.3f}",
            f"{part['auc_conditional']:.3f}",
        )
    console.print(table)


def _ece(found: Mapping[str, float]) -> str:
    return f"{found['value']:.1%} ({found['low']:.1%}-{found['high']:.1%})"
