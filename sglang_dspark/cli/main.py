"""`dspark`: the command line of the package. Each command lives in a module of its own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sglang_dspark.cli import (
    analyses,
    bench,
    calibrate,
    demo,
    doctor,
    models,
    quantize,
    report,
    sweep,
    train,
)
from sglang_dspark.errors import DSparkError
from sglang_dspark.extras import version, what_brings

_VERSIONS = ("sglang-dspark", "sglang", "torch")

app = typer.Typer(
    name="dspark",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _say_versions(wanted: bool) -> None:
    if wanted:
        named = (f"{name} {version(name) or 'absent'}" for name in _VERSIONS)
        print(", ".join(named))
        raise typer.Exit


@app.callback()
def dspark(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_say_versions,
            is_eager=True,
            help="Print the versions of this package, SGLang and torch, and exit.",
        ),
    ] = False,
) -> None:
    """DSpark speculative decoding for SGLang."""


app.add_typer(models.app, name="models")
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")
app.command("doctor")(doctor.doctor)
app.add_typer(analyses.app, name="eval")
app.command("calibrate")(calibrate.calibrate)
app.command("sweep")(sweep.sweep)
app.command("quantize")(quantize.quantize)
app.command("report")(report.report)
app.command("demo")(demo.demo)


def main() -> None:
    """Run the command line; a `DSparkError` is one line on stderr and exit status 1."""
    try:
        app()
    except DSparkError as error:
        print(f"dspark: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        line = what_brings(error)
        if line is None:
            raise
        print(f"dspark: {line}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("dspark: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
