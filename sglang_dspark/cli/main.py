"""`dspark`: run the command line of the package. Each command has its own module."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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


class _Commands(TyperGroup):
    """Print a line at Ctrl-C, where Typer ends silently."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("\ndspark: stopped", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="dspark",
    cls=_Commands,
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
    """Run the command line; only bugs print a traceback, other faults one line on stderr.

    Exit status 1: a `DSparkError`, a full disk, or an output pipe that was closed (then without
    a line, as for `| head`); 2: usage; 130: Ctrl-C.
    """
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a failure can be reported, not when Python ends
    except SystemExit as done:
        if doctor.exits_without_cleanup:
            os._exit(int(done.code or 0))  # half a second less than freeing 600 MiB of modules
        raise
    except DSparkError as error:
        print(f"dspark: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        line = what_brings(error)
        if line is None:
            raise
        print(f"dspark: {line}", file=sys.stderr)
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or "the output"
        print(f"dspark: cannot write {where}: {error.strerror}; free some disk", file=sys.stderr)
        _drop_output()
    sys.exit(1)


def _drop_output() -> None:
    """Discard stdout's buffer, which would fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
