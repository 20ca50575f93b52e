"""`dspark bench`: run measurements whose figures are published under `results/`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_dspark.cli import (
    _bench_adaptive,
    _bench_experts,
    _bench_llama,
    _bench_planner,
    _bench_products,
    _bench_screen,
    _bench_soak,
    _bench_trainer,
    _bench_weights,
)
from sglang_dspark.cli._models import (
    DeviceOption,
    ServedDrafterOption,
    ServedTargetOption,
    served_models,
)

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.loadtest.bench.paired import PairedRound, Plan
    from sglang_dspark.loadtest.client.load import Round
    from sglang_dspark.loadtest.servers.server import ServerSpec

app = typer.Typer(help="Measurements, each written to a result file.", no_args_is_help=True)


app.command("experts")(_bench_experts.experts)
app.command("planner")(_bench_planner.planner)
app.command("regret")(_bench_planner.regret)
app.command("trainer")(_bench_trainer.trainer)
app.command("adaptive")(_bench_adaptive.adaptive)
app.command("screen")(_bench_screen.screen)
app.command("soak")(_bench_soak.soak)
app.command("llama")(_bench_llama.llama)
app.command("weights")(_bench_weights.weights)
app.command("products")(_bench_products.products)


@app.callback()
def bench() -> None:
    """Run measurements, each written to a result file."""


@app.command()
def serve(
    concurrency: Annotated[str, typer.Option(help="Users at once, comma-separated.")] = "1,4,8",
    repeats: Annotated[int, typer.Option(min=1, help="Paired repeats of each concurrency.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length of an answer.")] = 96,
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("results/serve_cpu.json"),
    port: Annotated[int, typer.Option(help="First of two ports.")] = 30000,
    target: ServedTargetOption = "demo",
    drafter: ServedDrafterOption = "shipped",
    device: DeviceOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Compare DSPARK with plain decoding: tokens/s, step cost and tau, in one paired run."""
    import json

    from rich.console import Console

    from sglang_dspark.cli._progress import says_when_stopped
    from sglang_dspark.cli.demo import hardware
    from sglang_dspark.loadtest.bench.paired import as_metrics
    from sglang_dspark.loadtest.results import require_clean, write_results
    from sglang_dspark.loadtest.servers.server import stop_on_signals
    from sglang_dspark.loadtest.servers.workload import drafter_gamma, dspark_server, plain_server
    from sglang_dspark.ports import require_free_port

    console = Console(stderr=True, highlight=False)
    users = _bench_adaptive.users_of(concurrency)
    require_clean(out)
    for each in (port, port + 1):
        require_free_port("127.0.0.1", each)
    folder, draft, device = served_models(console, target, drafter, device)
    plan = _plan(folder, users, repeats, max_new_tokens)
    specs = (plain_server(folder, port, device), dspark_server(folder, draft, port + 1, device))
    with says_when_stopped(), stop_on_signals():
        results = _measure(console, specs, plan)
    metrics = as_metrics(results, plan, drafter_gamma(draft))
    write_results(out, "serve_cpu" if device == "cpu" else "serve", hardware(device), metrics)
    _show(console, metrics)
    console.print(f"written to {out}")
    if as_json:
        print(json.dumps(json.loads(out.read_text()), indent=2))


def _plan(target: Path, users: tuple[int, ...], repeats: int, max_new_tokens: int) -> Plan:
    from sglang_dspark.evaluation.prompts import demo_prompts
    from sglang_dspark.loadtest.bench.paired import Plan
    from sglang_dspark.loadtest.servers.workload import interleave, render

    prompts = tuple(render(target, prompt) for prompt in interleave(demo_prompts()))
    return Plan(prompts, users, repeats, max_new_tokens)


def _measure(
    console: Console, specs: tuple[ServerSpec, ServerSpec], plan: Plan
) -> dict[int, list[PairedRound]]:
    from sglang_dspark.cli._progress import stages
    from sglang_dspark.cli.demo import launch
    from sglang_dspark.loadtest.bench.paired import measure
    from sglang_dspark.loadtest.servers.server import run_directory

    run_dir = run_directory()
    done = 0

    def tell(name: str, round_: Round) -> None:
        nonlocal done
        done += 1
        progress("measuring", done, plan.rounds)
        console.print(f"{name}, {round_.users} users: {round_.tokens_per_s:.1f} tokens/s")

    with launch(console, specs[0], run_dir) as plain:
        plain.pause()
        with launch(console, specs[1], run_dir) as dspark, stages(console) as progress:
            progress("measuring", 0, plan.rounds)
            return asyncio.run(measure(plain, dspark, plan, tell))


def _show(console: Console, metrics: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="DSPARK against plain decoding: greedy", box=box.SIMPLE_HEAD)
    speeds = ("plain\ntok/s", "DSPARK\ntok/s", "speed-up", "95% interval")
    for name in ("users", *speeds, "to the\nlast answer", "tau", "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in metrics["by_concurrency"]:
        interval = "{:.2f} to {:.2f}".format(*row["speedup_ci95"]) if row["speedup_ci95"] else "-"
        table.add_row(
            str(row["concurrency"]),
            f"{row['plain']:.1f}",
            f"{row['dspark']:.1f}",
            f"{row['speedup']:.2f}x",
            interval,
            f"{row['whole_round_speedup']:.2f}x",
            f"{row['tau']:.2f}",
            "{} of {}".format(*row["identical"]),
        )
    console.print(table)
    if "step" in metrics:
        step = metrics["step"]
        console.print(
            f"one user: verify step {step['verify_ms']:.1f} ms, plain step "
            f"{step['plain_decode_ms']:.1f} ms, ratio {step['ratio']:.2f}"
        )
