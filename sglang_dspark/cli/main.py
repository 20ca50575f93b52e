"""`dspark`: the command line of the package. Each command lives in a module of its own."""

from __future__ import annotations

import sys

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

app = typer.Typer(
    name="dspark",
    help="DSpark speculative decoding for SGLang.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
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
    except KeyboardInterrupt:
        print("dspark: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
