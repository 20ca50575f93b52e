"""`dspark report`: make figures, a page and intervals from earlier measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.errors import DSparkError

IntervalsOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Result file of `dspark bench adaptive` or `serve`: take its ratios and intervals "
        "anew from the trials it keeps. Repeat for several."
    ),
]
RecordsOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of locust's workers' records, of one machine or several: count them together."
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="HTML file. Default: report.html in the sweep's folder, or drafters.html in "
        "that of the result files."
    ),
]


def report(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a sweep, as `dspark sweep` made it.")
    ] = None,
    drafters: Annotated[
        bool, typer.Option("--drafters", help="Report the analyses of drafters.")
    ] = False,
    intervals: IntervalsOption = None,
    records: RecordsOption = None,
    results: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("results"),
    out: OutOption = None,
) -> None:
    """Write one self-contained HTML page and its figures, of a sweep (RUN) or of --drafters.

    Or only recompute intervals (--intervals), or show what workers recorded (--records).
    """
    if [drafters, run is not None, bool(intervals), records is not None].count(True) != 1:
        raise DSparkError(
            "name what to report: a sweep's folder, --drafters, --intervals or --records"
        )
    if intervals:
        _intervals(intervals)
    elif records is not None:
        _records(records)
    elif run is not None:
        from rich.console import Console

        for path in write_sweep_report(run, out or run / "report.html"):
            Console().print(f"written to {path}", highlight=False, soft_wrap=True)
    else:
        _drafters(results, out or results / "drafters.html")


def _records(folder: Path) -> None:
    from rich.console import Console

    from sglang_dspark.cli._records_view import show_records

    show_records(Console(), folder)


def write_sweep_report(run: Path, html: Path) -> list[Path]:
    """Write a sweep's page, and its figures to a folder of the page's name; return all paths.

    Raises DSparkError as `make_report` does, or if a file cannot be written.
    """
    from sglang_dspark.loadtest.report.page import make_report, save_figures

    made = make_report(run)
    written = save_figures(made, html.with_suffix(""))
    replace_text(html, made.html, "the report")
    return [*written, html]


def _intervals(files: list[Path]) -> None:
    """Republish each file, and its figure if it has one."""
    from rich.console import Console

    from sglang_dspark.cli._bench_adaptive import draw
    from sglang_dspark.loadtest.bench.republish import republish

    for path in files:
        metrics = republish(path)
        written = [path]
        if "promises" in metrics:
            written.append(path.parent / "figures" / f"{path.stem}.png")
            draw(metrics, written[-1])
        for each in written:
            Console().print(f"written to {each}", highlight=False, soft_wrap=True)


def _drafters(results: Path, html: Path) -> None:
    """Redraw all figures of the analyses, gather drafters.json, and write their page."""
    from rich.console import Console

    from sglang_dspark.cli._workload import device_description
    from sglang_dspark.common.machine import without_speed
    from sglang_dspark.evaluation import figures, page
    from sglang_dspark.loadtest.results import write_results

    console = Console()
    found = page.read_results(results)
    written = []
    for each in found:
        drawn = figures.draw(each.result)
        written += figures.save(drawn, results / "figures" / each.stem)
    gathered = results / "drafters.json"
    # The page only redraws: the device is the one that measured.
    devices = {without_speed(str(each.document["device"])) for each in found}
    device = devices.pop() if len(devices) == 1 else f"several; gathered on {device_description()}"
    write_results(gathered, "drafters", device, page.drafter_summary(found))
    replace_text(html, page.render(found, "Drafters: DSpark and its peers"), "the page")
    for path in (*written, gathered, html):
        console.print(f"written to {path}", highlight=False, soft_wrap=True)
