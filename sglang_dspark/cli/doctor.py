"""`dspark doctor`: check whether this installation can serve with DSPARK, else say what to do."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.serving.diagnosis import Diagnosis, SeamReport

exits_without_cleanup = False  # if true, `main` calls os._exit
_COLOURS = {"installed": "green", "inert": "dim", "mismatch": "red", "not installed": "yellow"}


def doctor(
    everything: Annotated[
        bool, typer.Option("--all", help="Show all that was looked at, each patch of SGLang too.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")
    ] = False,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="ARGS",
            help="A server's argument line in quotes: say what it would do, without starting it. "
            "With --all check the patches of modules that no argument needs, too.",
        ),
    ] = None,
) -> None:
    """Check whether a DSPARK server can start here; if not, show what is wrong and what to do.

    Exit status 0 if one can, 1 otherwise. With --serve, 0 if that server is scheduled.
    """
    global exits_without_cleanup
    gc.disable()  # this process imports and ends: collections would be a third of its time
    exits_without_cleanup = True
    if serve is not None:
        raise typer.Exit(_report_launch(serve, everything, as_json))
    raise typer.Exit(_report_installation(everything, as_json))


def _report_installation(everything: bool, as_json: bool) -> int:
    """Print what is installed and what is wrong with it; return the exit status."""
    with _without_chatter(shown=everything or as_json):
        from sglang_dspark.backends.kernel_report import look_at_kernels
        from sglang_dspark.patches.seam_report import look_at_seams
        from sglang_dspark.serving.diagnosis import diagnose

        found = diagnose(look_at_kernels, look_at_seams)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        if everything:
            _show_facts(console, found)
            _show_seams(console, found)
        _show_verdict(console, found)
    return 0 if found.fit else 1


def _report_launch(line: str, everything: bool, as_json: bool) -> int:
    """Print what a server with this argument line would do; return the exit status."""
    with _without_chatter(shown=everything or as_json):
        from sglang_dspark.backends.launch_report import report_launch

        found = report_launch(line, complete=everything)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        for name, text in found.facts.items():
            print(f"{name}: {text}")
        print(f"verdict: {found.verdict}")
    return 0 if found.scheduled else 1


@contextlib.contextmanager
def _without_chatter(*, shown: bool) -> Iterator[None]:
    """Keep the output of imports off stdout; print it on stderr only if everything is shown."""
    stderr = sys.stderr if shown else io.StringIO()
    with contextlib.redirect_stdout(stderr), contextlib.redirect_stderr(stderr):
        yield


def _show_verdict(console: Console, found: Diagnosis) -> None:
    def say(text: str, style: str) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    versions = ", ".join(f"{name} {found.versions[name]}" for name in ("sglang", "torch"))
    where = found.install.get("kind", "unknown")
    if found.fit:
        say(f"ok: fit to serve with DSPARK ({versions}, device {where})", "bold green")
    else:
        count = len(found.problems)
        words = "one problem" if count == 1 else f"{count} problems"
        say(f"not fit to serve with DSPARK: {words}", "bold red")
    for problem in found.problems:
        say(f"problem: {problem}", "red")
    if found.advice:
        say(f"what to do: {found.advice}", "bold")
    for note in found.notes:
        say(f"note: {note}", "yellow")


def _placed(model: dict[str, Any]) -> str:
    if not model:
        return "not looked at"
    sizes = "".join(f", {kind} {size} MB" for kind, size in model.get("megabytes", {}).items())
    return f"{model['state']} ({model['path']}{sizes})"


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
        "names of SGLang": ", ".join(f"{v} {k}" for k, v in found.upstream.items()),
        "demo target": _placed(found.target),
        "shipped drafter": _placed(found.drafter),
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
        check = "ok" if seam.found == seam.expected else seam.found
        if not seam.signature_ok:
            check = f"expected {seam.expected}, found {seam.found}"
        table.add_row(
            Text(seam.name),
            Text(f"{seam.target.removeprefix('sglang.srt.')} ({seam.kind})"),
            Text(check),
            Text(seam.state, style=_COLOURS[seam.state]),
            Text(_reason(seam)),
        )
    console.print(table)


def _reason(seam: SeamReport) -> str:
    """Return why a patch exists; for a fix of SGLang also its issue and when to drop it."""
    if not seam.issue:
        return seam.why
    return f"{seam.why}\nissue: {seam.issue}\ndrop when: {seam.drop_when}"
