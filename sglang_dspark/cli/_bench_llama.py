"""`dspark bench llama`: compare SGLang, plain and with DSPARK, with llama.cpp for one user."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_dspark.cli._models import ServedDrafterOption, ServedTargetOption, served_models

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.loadtest.bench.llama import LlamaCpp, Plan, Speed
    from sglang_dspark.loadtest.servers.server import ServerSpec

RESULTS = Path("results/llama_cpu.json")
DEMO = "demo"

GgufOption = Annotated[
    Path | None, typer.Option(help="The target as GGUF. The demo target's is at hand.")
]
WeightsOption = Annotated[
    str, typer.Option(help="Weights of our servers, `cpu.weights`, comma-separated.")
]


def llama(
    weights: WeightsOption = "float32,int8",
    formats: Annotated[str, typer.Option(help="llama.cpp's formats.")] = "f16,q8_0,q4_0",
    threads: Annotated[int, typer.Option(min=1, help="Threads that each arm computes with.")] = 1,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a repeat.")] = 9,
    tokens: Annotated[int, typer.Option(min=2, help="Length of an answer.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Fewer than three give no interval.")] = 5,
    out: Annotated[Path, typer.Option("--json", help="Result file.")] = RESULTS,
    port: Annotated[int, typer.Option(help="First port; each server takes the next.")] = 30000,
    target: ServedTargetOption = DEMO,
    drafter: ServedDrafterOption = "shipped",
    gguf: GgufOption = None,
) -> None:
    """Measure one user's tokens/s: SGLang plain and with DSPARK, and llama.cpp, on this CPU."""
    from rich.console import Console

    from sglang_dspark.cli._progress import says_when_stopped
    from sglang_dspark.cli.demo import hardware
    from sglang_dspark.errors import DSparkError
    from sglang_dspark.loadtest.bench.llama import as_metrics, require_package
    from sglang_dspark.loadtest.results import require_clean, write_results
    from sglang_dspark.loadtest.servers.server import run_directory, stop_on_signals

    console = Console(stderr=True, highlight=False)
    require_package()
    require_clean(out)
    if gguf is None and target != DEMO:
        raise DSparkError("--gguf: name a GGUF file with the weights of --target")
    folder, draft, _ = served_models(console, target, drafter, "cpu")
    plan = _plan(folder, prompts, tokens, repeats, threads)
    kept = [each.strip() for each in weights.split(",")]
    specs = _specs(folder, draft, kept, port, run_directory(), threads)
    kinds = [each.strip().lower() for each in formats.split(",")]
    with says_when_stopped(), stop_on_signals(), tempfile.TemporaryDirectory() as scratch:
        found = _measure(console, specs, _files(kinds, gguf, Path(scratch)), plan)
    metrics = as_metrics(found, plan, {"served": f"{folder.name} with {draft.name}"})
    write_results(out, out.stem, hardware("cpu"), metrics)
    _show(console, metrics)
    console.print(f"written to {out}")


def _plan(target: Path, prompts: int, tokens: int, repeats: int, threads: int) -> Plan:
    from transformers import AutoTokenizer

    from sglang_dspark.evaluation.prompts import demo_prompts
    from sglang_dspark.loadtest.bench.llama import Plan
    from sglang_dspark.loadtest.servers.workload import interleave, render

    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [render(target, each) for each in interleave(demo_prompts())[:prompts]]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return Plan(tuple(tuple(each) for each in ids), tokens, repeats, threads)


def _specs(
    target: Path, drafter: Path, weights: list[str], port: int, run_dir: Path, threads: int
) -> list[ServerSpec]:
    """Return a plain and a DSPARK server for each format of our weights."""
    from dataclasses import replace

    from sglang_dspark.loadtest.servers.workload import dspark_server, plain_server
    from sglang_dspark.ports import require_free_port

    specs = []
    for number, kind in enumerate(weights):
        config = run_dir / f"{kind}.yaml"
        config.parent.mkdir(parents=True, exist_ok=True)
        # With quantised weights, llama.cpp rounds rows to eight bits, too.
        config.write_text(f"cpu: {{weights: {kind}, activations: narrow, threads: {threads}}}\n")
        pair = (
            plain_server(target, port + 2 * number, "cpu"),
            dspark_server(target, drafter, port + 2 * number + 1, "cpu"),
        )
        for spec in pair:
            require_free_port("127.0.0.1", spec.port)
            arguments = (*spec.arguments, "--dspark-config", str(config))
            specs.append(replace(spec, name=f"{spec.name}-{kind}", arguments=arguments))
    return specs


def _files(kinds: list[str], gguf: Path | None, scratch: Path) -> dict[str, Path]:
    """Return a GGUF file in each of llama.cpp's formats."""
    from sglang_dspark.loadtest.bench.llama import quantised
    from sglang_dspark.models.source import obtain_gguf

    source = gguf or obtain_gguf(scratch)
    return {kind: quantised(source, kind, scratch) for kind in kinds}


def _measure(
    console: Console, specs: list[ServerSpec], files: dict[str, Path], plan: Plan
) -> dict[str, list[Speed]]:
    from sglang_dspark.cli._progress import stages
    from sglang_dspark.cli.demo import launch
    from sglang_dspark.loadtest.bench.llama import LlamaCpp, Served, measure
    from sglang_dspark.loadtest.servers.server import run_directory

    run_dir, done = run_directory(), 0
    with ExitStack() as stack:
        served = []
        for spec in specs:
            process = stack.enter_context(launch(console, spec, run_dir))
            process.pause()
            served.append(Served(spec.name, process))
        rivals: list[LlamaCpp] = []
        for kind, path in files.items():
            rivals.append(LlamaCpp(kind, path, plan.threads))
            stack.callback(rivals[-1].close)
        progress = stack.enter_context(stages(console))
        total = plan.repeats * (len(served) + len(rivals))

        def tell(name: str, speed: Speed) -> None:
            nonlocal done
            done += 1
            progress("measuring", done, total)
            console.print(f"{name}: {speed.whole:.1f} tokens/s, decode {speed.decode:.1f}")

        return asyncio.run(measure([*served, *rivals], plan, tell))


def _show(console: Console, metrics: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="One user, greedy", box=box.SIMPLE_HEAD)
    for name in ("", "tokens/s", "decode"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for row in metrics["arms"]:
        table.add_row(row["arm"], f"{row['tokens_per_s']:.1f}", f"{row['decode_tokens_per_s']:.1f}")
    console.print(table)
    for row in metrics["ratios"]:
        bounds = row["whole_ci95"]
        interval = "({:.2f} to {:.2f})".format(*bounds) if bounds else "(too few repeats)"
        console.print(f"{row['arm']} over {row['over']}: {row['whole']:.2f}x {interval}")
