"""`dspark models`: get the demo target, fetch models by name, convert a drafter's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sglang_dspark.cli._workload import TargetOption, drafter_dir, target_dir
from sglang_dspark.errors import DSparkError

app = typer.Typer(help="Build, fetch and convert models.", no_args_is_help=True)


@app.callback()
def models() -> None:
    """Build, fetch and convert models."""


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


@app.command()
def convert(
    drafter: Annotated[str, typer.Argument(help="Drafter: a folder, or its Hugging Face id.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    target: TargetOption = "demo",
) -> None:
    """Write a drafter of DeepSpec, Speculators or DFlash as SGLang's DSPARK reads it."""
    from rich.console import Console

    from sglang_dspark.cli._models import target_facts
    from sglang_dspark.serving.checkpoint import convert_drafter

    source = drafter_dir(drafter)
    if out.resolve() == source.resolve():
        raise DSparkError(f"--out {out} is the drafter itself; name another directory")
    facts = target_facts(target_dir(target, Console(stderr=True)))
    convert_drafter(source, out, facts)
    print(f"{out}: serve it with `dspark demo --drafter {out} --target {target}`")
