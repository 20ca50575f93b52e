"""`dspark models`: get the models that the demo and the tests run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Build and locate models.", no_args_is_help=True)


@app.callback()
def models() -> None:
    """Build and locate models."""


@app.command()
def demo(
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Root of the cache. Default: $XDG_CACHE_HOME or ~/.cache."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Build again even if it is there.")
    ] = False,
    gguf: Annotated[
        Path | None,
        typer.Option(help="A local SmolLM2-135M-Instruct.Q4_1.gguf, for machines without network."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Build the demo target (SmolLM2-135M-Instruct, Apache-2.0) and print where it lies."""
    from rich.console import Console

    from sglang_dspark.cli._progress import stages
    from sglang_dspark.models.demo import ensure_demo_target, provenance

    with stages(Console(stderr=True)) as progress:
        path = ensure_demo_target(cache_dir, progress, force=force, gguf=gguf)
    if as_json:
        print(json.dumps({"path": str(path), "provenance": provenance(path)}, indent=2))
    else:
        print(path)
