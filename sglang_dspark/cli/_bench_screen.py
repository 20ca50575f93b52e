"""`dspark bench screen`: check that a drafting server copies token for token like a plain one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from sglang_dspark.cli._models import (
    DeviceOption,
    ServedDrafterOption,
    ServedTargetOption,
    served_models,
)

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.loadtest.bench.copy_tasks import Task
    from sglang_dspark.loadtest.bench.screen import Difference, Journal, Plan
    from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec

RESULTS = Path("results/screen_cpu.json")
NEAR_TIE = 1e-3
SHOWN = 20  # differences on the terminal; the result file has all
# Causes retractions: the scheduler admits more than its pool can hold to the end.
_OPTIMISM = ("--schedule-conservativeness", "0.01")

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="The drafting server's --dspark-config file.")
]
LabelOption = Annotated[
    str, typer.Option(help="Name of this run in the result file, which keeps those of other names.")
]
NearTieOption = Annotated[
    float,
    typer.Option(min=0.0, help="Tokens less than so many nats apart may swap by rounding."),
]
ResumeOption = Annotated[
    Path | None, typer.Option(help="Folder of a screen that was cut off, to go on with.")
]
PoolOption = Annotated[
    int, typer.Option(min=256, help="Tokens of the KV pool: few, so that requests are retracted.")
]


class _Pair(NamedTuple):
    """Models to screen, and the servers' flags. configured: content of the file `config`."""

    target: Path
    drafter: Path
    device: str
    config: Path | None
    configured: str
    flags: tuple[str, ...]


def screen(
    requests: Annotated[int, typer.Option(min=1, help="Copies that are asked for.")] = 500,
    users: Annotated[int, typer.Option(min=1, help="Requests at once at most.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=4, help="Longest answer.")] = 48,
    pool_tokens: PoolOption = 2048,
    chunk: Annotated[int, typer.Option(min=16, help="Tokens of a chunk of the prefill.")] = 128,
    near_tie: NearTieOption = NEAR_TIE,
    seed: Annotated[int, typer.Option(help="Of tasks, lengths and arrivals.")] = 0,
    config: ConfigOption = None,
    label: LabelOption = "",
    out: Annotated[Path, typer.Option("--json", help="Result file.")] = RESULTS,
    resume: ResumeOption = None,
    port: Annotated[int, typer.Option(help="Port of whichever server runs.")] = 30000,
    target: ServedTargetOption = "demo",
    drafter: ServedDrafterOption = "shipped",
    device: DeviceOption = "",
) -> None:
    """Compare copies with DSPARK and without; exit status 2 if one differs unexplained."""
    from rich.console import Console

    from sglang_dspark.loadtest.results import require_clean
    from sglang_dspark.loadtest.servers.server import run_directory
    from sglang_dspark.ports import require_free_port

    console = Console(stderr=True, highlight=False)
    require_clean(out)
    require_free_port("127.0.0.1", port)
    flags = _flags(users, pool_tokens, chunk)
    configured = _configured(config)
    pair = _Pair(*served_models(console, target, drafter, device), config, configured, flags)
    plan = _plan(pair.target, requests, max_new_tokens, users, seed)
    run_dir = resume or run_directory()
    metrics, found = _screened(console, pair, port, plan, run_dir, chunk, near_tie)
    _publish(out, pair, label or f"{pair.target.name} with {pair.drafter.name}", metrics)
    _show(console, metrics, found)
    console.print(f"written to {out}; answers: {run_dir}")
    if metrics["unexplained"]:
        raise typer.Exit(2)


def _plan(target: Path, requests: int, most_tokens: int, users: int, seed: int) -> Plan:
    from sglang_dspark.loadtest.bench.copy_tasks import copy_tasks
    from sglang_dspark.loadtest.bench.screen import Plan

    return Plan.of(_rendered(target, copy_tasks(requests, most_tokens, seed)), users, seed)


def _screened(
    console: Console,
    pair: _Pair,
    port: int,
    plan: Plan,
    run_dir: Path,
    chunk: int,
    near_tie: float,
) -> tuple[dict[str, Any], list[Difference]]:
    """Return the figures and the differences."""
    from sglang_dspark.cli._progress import says_when_stopped
    from sglang_dspark.loadtest.bench.screen import Coverage, Journal, as_metrics
    from sglang_dspark.loadtest.servers.server import stop_on_signals

    head = _head(pair, plan)
    journals = tuple(Journal(run_dir / f"{name}.jsonl", head) for name in ("dspark", "plain"))
    with says_when_stopped(), stop_on_signals():
        found = _compared(console, _specs(pair, port), plan, journals, run_dir, near_tie)
    dspark, plain = (Coverage.of(plan, journal.waves, chunk) for journal in journals)
    return as_metrics(found, plain, dspark, near_tie, plan), found


def _head(pair: _Pair, plan: Plan) -> dict[str, Any]:
    """Return the facts that the answers in a journal depend on."""
    from sglang_dspark.cli.demo import hardware
    from sglang_dspark.loadtest.bench.journal import served_head

    return {
        "plan": plan.fingerprint(),
        **served_head(pair.target, pair.drafter, hardware(pair.device)),
        "config": pair.configured,
        "flags": list(pair.flags),
    }


def _configured(config: Path | None) -> str:
    """Read a server's configuration file. Raises DSparkError if it cannot be read."""
    from sglang_dspark.common.files import reading

    if config is None:
        return ""
    with reading(config, "server's configuration", "name another --config"):
        return config.read_text(encoding="utf-8").strip()


def _rendered(target: Path, tasks: list[Task]) -> list[Task]:
    """Render the tasks in the target's chat template, or as plain text if it has none."""
    from sglang_dspark.cli._bench_soak import renderer
    from sglang_dspark.evaluation.prompts import EvalPrompt

    render = renderer(target)
    return [
        replace(task, prompt=render(EvalPrompt(task.kind, task.kind, (task.prompt,))))
        for task in tasks
    ]


def _flags(users: int, pool_tokens: int, chunk: int) -> tuple[str, ...]:
    """Return the flags of both servers, chosen so that edge cases occur."""
    return (
        "--max-running-requests",
        str(users),
        "--max-total-tokens",
        str(pool_tokens),
        "--chunked-prefill-size",
        str(chunk),
        "--enable-metrics",
        *_OPTIMISM,
    )


def _specs(pair: _Pair, port: int) -> tuple[ServerSpec, ServerSpec]:
    """Return the drafting server and the plain one; the last of a repeated flag wins."""
    from sglang_dspark.loadtest.servers.workload import dspark_server, plain_server

    dspark = dspark_server(pair.target, pair.drafter, port, pair.device)
    plain = plain_server(pair.target, port, pair.device)
    ours = ("--dspark-config", str(pair.config)) if pair.config else ()
    return (
        replace(dspark, arguments=(*dspark.arguments, *pair.flags, *ours)),
        replace(plain, arguments=(*plain.arguments, *pair.flags)),
    )


def _compared(
    console: Console,
    specs: tuple[ServerSpec, ServerSpec],
    plan: Plan,
    journals: tuple[Journal, ...],
    run_dir: Path,
    near_tie: float,
) -> list[Difference]:
    """Compare answers, one server at a time; start it only for missing answers or to explain."""
    from sglang_dspark.cli.demo import launch
    from sglang_dspark.loadtest.bench.screen import compare, explain

    dspark, plain = journals
    if len(dspark.waves) < len(plan.waves):
        with launch(console, specs[0], run_dir) as server:
            _answer(console, server, plan, dspark)
    if len(plain.waves) < len(plan.waves):
        with launch(console, specs[1], run_dir) as server:
            _answer(console, server, plan, plain)
            found = compare(plan, plain.waves, dspark.waves)
            return asyncio.run(explain(server.spec.url, plan, plain.waves, found, near_tie))
    found = compare(plan, plain.waves, dspark.waves)
    if not found:
        return []
    with launch(console, specs[1], run_dir) as server:
        return asyncio.run(explain(server.spec.url, plan, plain.waves, found, near_tie))


def _answer(console: Console, server: ServerProcess, plan: Plan, journal: Journal) -> None:
    from sglang_dspark.cli._progress import stages
    from sglang_dspark.loadtest.bench.screen import answer

    with stages(console) as progress:
        stage = f"{server.spec.name} answers {plan.requests} requests"
        progress(stage, sum(len(wave.answers) for wave in journal.waves), plan.requests)
        asyncio.run(
            answer(
                server.spec.url, plan, journal, lambda done: progress(stage, done, plan.requests)
            )
        )


def _publish(out: Path, pair: _Pair, label: str, metrics: dict[str, Any]) -> None:
    """Write the result file: this run next to those of other names in the file."""
    from sglang_dspark.cli.demo import hardware
    from sglang_dspark.loadtest.bench.screen import kept_runs
    from sglang_dspark.loadtest.results import command, commit, now, write_results

    run = {
        "served": f"{pair.target.name} with {pair.drafter.name}",
        "config": pair.configured,
        "flags": " ".join(pair.flags),
        "command": command(),
        "commit": commit(),
        "date": now(),
        **metrics,
    }
    runs = {**kept_runs(out), label: run}
    write_results(out, out.stem, hardware(pair.device), {"runs": runs})


def _show(console: Console, metrics: dict[str, Any], found: list[Difference]) -> None:
    for difference in found[:SHOWN]:
        console.print(str(difference), markup=False)
    dspark = metrics["dspark"]
    tau = f"tau {metrics['tau']:.2f}" if metrics["tau"] else "nothing drafted"
    console.print(
        f"{metrics['requests']} requests, {metrics['tokens']} tokens, {tau}; "
        f"{dspark['chunked']} prefilled in chunks, {dspark['cached']} with a cached prefix, "
        f"{dspark['retracted']} retracted, {dspark['cold']} cold starts"
    )
    for text in metrics["not_met"]:
        console.print(f"[yellow]not screened: {text}[/]")
    console.print(
        f"{metrics['unexplained']} unexplained differences, {metrics['near_ties']} near ties "
        f"(below {metrics['near_tie_nats']:g} nats)"
    )
