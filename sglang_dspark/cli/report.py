"""`dspark report`: figures and one HTML page from the result files, without measuring anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from sglang_dspark.errors import DSparkError


def report(
    drafters: Annotated[
        bool, typer.Option("--drafters", help="Report the analyses of drafters.")
    ] = False,
    results: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("results"),
    out: Annotated[
        Path | None, typer.Option(help="HTML file. Default: drafters.html in that folder.")
    ] = None,
) -> None:
    """Redraw all figures, gather drafters.json, and write one self-contained HTML page."""
    from rich.console import Console

    from sglang_dspark.cli._workload import device_description
    from sglang_dspark.evaluation import figures, page
    from sglang_dspark.loadtest.results import write_results

    if not drafters:
        raise DSparkError("name what to report: --drafters")
    console = Console()
    found = page.read_results(results)
    written = []
    for result in found:
        drawn = figures.draw(result.metrics)
        written += figures.save(drawn, results / "figures" / result.stem)
    gathered = results / "drafters.json"
    # The page redraws; what was measured stays the work of the device that measured it.
    devices = {str(result.document["device"]) for result in found}
    device = devices.pop() if len(devices) == 1 else f"several; gathered on {device_description()}"
    write_results(gathered, "drafters", device, page.drafter_summary(found))
    html = out or results / "drafters.html"
    _write_text(html, page.render(found, "Drafters: DSpark and its peers"))
    for path in (*written, gathered, html):
        console.print(f"written to {path}", highlight=False, soft_wrap=True)


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise DSparkError(f"cannot write {path}: {error.strerror}") from error
