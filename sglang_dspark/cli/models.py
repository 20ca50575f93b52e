"""`dspark models`: get the demo target, fetch models by name, convert a drafter's layout."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_dspark.cli._workload import TargetOption, drafter_dir, target_dir
from sglang_dspark.errors import DSparkError

if TYPE_CHECKING:
    from rich.console import Console

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
    """Build the demo target (SmolLM2-135M-Instruct, Apache-2.0) and print its path."""
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
    """Convert a drafter of DeepSpec, Speculators or DFlash to the layout of SGLang's DSPARK."""
    from rich.console import Console

    from sglang_dspark.cli._models import target_facts
    from sglang_dspark.serving.checkpoint import convert_drafter

    source = drafter_dir(drafter)
    if out.resolve() == source.resolve():
        raise DSparkError(f"--out {out} is the drafter itself; name another directory")
    console = Console(stderr=True)
    folder = target_dir(target, console)
    with TemporaryDirectory() as kept:
        read = _with_anchor_row(source, folder, Path(kept), console)
        convert_drafter(read, out, target_facts(folder))
    print(f"{out}: serve it with `dspark demo --drafter {out} --target {target}`")


def _with_anchor_row(source: Path, target: Path, kept: Path, console: Console) -> Path:
    """Return the drafter with a config.json that says whether its anchor row drafts.

    If it does not say so, both values are measured on the target; the better one is in `kept`.
    """
    from sglang_dspark.evaluation.anchor_row import FIELD, is_missing, measured, settled

    if not is_missing(source):
        return source
    from sglang_dspark.cli._workload import open_tokenizer
    from sglang_dspark.evaluation.prompts import encode, evaluation_prompts

    console.print(f"{FIELD} is missing in config.json: both readings are measured ...")
    tokenizer = open_tokenizer(target)
    single = [prompt for prompt in evaluation_prompts()[::4] if len(prompt.turns) == 1]
    prompts = [encode(tokenizer, prompt) for prompt in single]
    readings = {value: settled(source, value, kept / str(value)) for value in (True, False)}
    value, rates = measured(readings, target, prompts)
    console.print(
        f"{FIELD} is {str(value).lower()}: {rates[value]:.0%} of first drafts are accepted so, "
        f"{rates[not value]:.0%} otherwise"
    )
    return readings[value]
