"""`dspark doctor`: says whether this installation can serve with DSPARK, and if not, what to do."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.serving.diagnosis import Diagnosis

_COLOURS = {"installed": "green", "inert": "dim", "mismatch": "red", "not installed": "yellow"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")
    ] = False,
) -> None:
    """Check versions, device, each patch of SGLang, configuration, target and drafter.

    Exit status 0 when a DSPARK server can start here, 1 otherwise.
    """
    from sglang_dspark.serving.diagnosis import diagnose

    with contextlib.redirect_stdout(sys.stderr):  # what the imports print must not mix in
        found = diagnose()
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _show(found)
    raise typer.Exit(0 if found.fit else 1)


def _show(found: Diagnosis) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    _show_facts(console, found)
    _show_seams(console, found)
    for note in found.notes:
        console.print("note:", note, style="yellow", markup=False, soft_wrap=True)
    for problem in found.problems:
        console.print("problem:", problem, style="red", markup=False, soft_wrap=True)
    if found.fit:
        console.print("fit to serve with DSPARK", style="bold green")
    else:
        console.print(f"not fit to serve: {len(found.problems)} problem(s)", style="bold red")


def _show_facts(console: Console, found: Diagnosis) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = {
        "versions": ", ".join(f"{k} {v or 'absent'}" for k, v in found.versions.items()),
        "installation": ", ".join(f"{k}: {v}" for k, v in found.install.items()),
        "device": ", ".join(f"{k}: {v}" for k, v in found.device.items()),
        "entry points": ", ".join(
            f"{k} {'present' if v else 'MISSING'}" for k, v in found.entry_points.items()
        ),
        "demo target": f"{found.target['state']} ({found.target['path']})",
        "shipped drafter": f"{found.drafter['state']} ({found.drafter['path']})",
    }
    for name, value in found.config.get("values", {}).items():
        rows[f"config {name}"] = f"{value['value']} ({value['origin']})"
    table = Table(show_header=False, title="sglang-dspark", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(Text(name), Text(text))
    console.print(table)


def _show_seams(console: Console, found: Diagnosis) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="patches of SGLang", title_justify="left")
    for heading in ("seam", "target and kind", "signature", "state", "why"):
        table.add_column(heading, overflow="fold")
    for seam in found.seams:
        if seam.state == "inert":
            check = "not looked at"
        else:
            check = "ok" if seam.signature_ok else f"expected {seam.expected}, found {seam.found}"
        table.add_row(
            Text(seam.name),
            Text(f"{seam.target.removeprefix('sglang.srt.')} ({seam.kind})"),
            Text(check),
            Text(seam.state, style=_COLOURS[seam.state]),
            Text(seam.why),
        )
    console.print(table)
