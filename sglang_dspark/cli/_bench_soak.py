"""`dspark bench soak`: run minutes of mixed load with aborts and bursts; check the accounts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_dspark.cli._models import (
    DeviceOption,
    ServedDrafterOption,
    ServedTargetOption,
    served_models,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from sglang_dspark.evaluation.prompts import EvalPrompt
    from sglang_dspark.loadtest.bench.soak import Soak
    from sglang_dspark.loadtest.bench.soak_run import Asked
    from sglang_dspark.loadtest.servers.server import ServerSpec

RESULTS = Path("results/soak_cpu.json")
MIX = "math,code,chat"
# The KV pool's memory is allocated page by page when its slots are first written. A pool of
# this many tokens for each user is fully written in the first minutes, so later growth has
# another cause.
POOL_TOKENS = 1024

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="The server's --dspark-config file.")
]
ShareOption = Annotated[
    float, typer.Option(min=0.05, max=1.5, help="Load as a part of the capacity measured first.")
]
NoteOption = Annotated[
    str, typer.Option(help="Kept in the result file: what else the machine did.")
]


def soak(
    minutes: Annotated[float, typer.Option(min=0.25, help="Of load.")] = 30.0,
    share: ShareOption = 0.8,
    users: Annotated[int, typer.Option(min=1, help="Requests that run at once at most.")] = 16,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    config: ConfigOption = None,
    note: NoteOption = "",
    out: Annotated[Path, typer.Option("--json", help="Result file.")] = RESULTS,
    port: Annotated[int, typer.Option(help="Port of the server.")] = 30000,
    target: ServedTargetOption = "demo",
    drafter: ServedDrafterOption = "shipped",
    device: DeviceOption = "",
) -> None:
    """Run mixed load; exit status 2 for errors, growth, slowdown or unaccounted tokens."""
    from rich.console import Console

    from sglang_dspark.loadtest.results import require_clean
    from sglang_dspark.ports import require_free_port

    console = Console(stderr=True, highlight=False)
    require_clean(out)
    require_free_port("127.0.0.1", port)
    folder, draft, device = served_models(console, target, drafter, device)
    asked = _asked(folder, minutes, share, users, seed)
    done = _soak(console, _spec(folder, draft, port, device, users, config), asked)
    served = {
        "served": f"{folder.name} with {draft.name}",
        "config": config.read_text().strip() if config else "",
        "note": note,
    }
    _publish(out, device, served, done)
    _show(console, done)
    console.print(f"written to {out}")
    if done.faults():
        raise typer.Exit(2)


def _asked(target: Path, minutes: float, share: float, users: int, seed: int) -> Asked:
    from sglang_dspark.loadtest.bench.soak_run import Asked
    from sglang_dspark.loadtest.client.mixes import load_mix
    from sglang_dspark.loadtest.servers.workload import interleave

    prompts = tuple(interleave(load_mix(MIX).prompts))
    return Asked(minutes, share, users, seed, prompts, renderer(target))


def _publish(out: Path, device: str, served: dict[str, str], done: Soak) -> None:
    from sglang_dspark.cli.demo import hardware
    from sglang_dspark.loadtest.results import write_results

    write_results(out, out.stem, hardware(device), {**served, **done.as_metrics()})


def renderer(target: Path) -> Callable[[EvalPrompt], str]:
    """Return a function that renders a conversation: by chat template, or its turns without one."""
    from sglang_dspark.loadtest.servers.workload import render

    if (target / "chat_template.jinja").is_file():
        return lambda prompt: render(target, prompt)
    return lambda prompt: "\n\n".join(prompt.turns)


def _spec(
    target: Path, drafter: Path, port: int, device: str, users: int, config: Path | None
) -> ServerSpec:
    """Return the server; the last of a repeated flag wins."""
    from sglang_dspark.loadtest.servers.workload import dspark_server

    spec = dspark_server(target, drafter, port, device)
    ours = ("--dspark-config", str(config)) if config else ()
    pool = ("--max-total-tokens", str(POOL_TOKENS * max(users, 4)))
    flags = ("--max-running-requests", str(users), *pool, "--enable-metrics", *ours)
    return replace(spec, arguments=(*spec.arguments, *flags))


def _soak(console: Console, spec: ServerSpec, asked: Asked) -> Soak:
    from sglang_dspark.cli._progress import says_when_stopped, stages
    from sglang_dspark.cli.demo import launch
    from sglang_dspark.loadtest.bench.soak_run import soak as run
    from sglang_dspark.loadtest.servers.server import run_directory, stop_on_signals

    run_dir = run_directory()
    with (
        says_when_stopped(),
        stop_on_signals(),
        launch(console, spec, run_dir) as server,
        stages(console) as progress,
    ):
        return run(server, asked, run_dir, progress)


def _show(console: Console, done: Soak) -> None:
    console.print(
        f"{done.load.rate:.2f} requests/s, {done.share:.0%} of {done.capacity:.0f} tokens/s, for "
        f"{done.load.seconds / 60:g} min; bursts of {done.load.burst_size}"
    )
    outcomes = ", ".join(f"{count} {name}" for name, count in done.outcomes.items())
    console.print(f"{outcomes}; {done.spec.accepted} drafts accepted, tau {done.spec.tau:.2f}")
    for each in done.memory:
        judged = "" if each.judged else ", too short to judge"
        console.print(
            f"{each.process}: {each.last:.0f} MiB, {each.slope:+.2f} ({each.low:+.2f} to "
            f"{each.high:+.2f}) MiB a minute{judged}",
            markup=False,
        )
    for drift in done.drift:
        settled = "held" if drift.held else "slower" if drift.slower else "not settled"
        console.print(
            f"p99 of {drift.latency}, last third over first: {drift.ratio:.2f} ({drift.low:.2f} to "
            f"{drift.high:.2f}), {settled}"
        )
    for fault in done.faults():
        console.print(f"[red]{fault}[/]")
    if not done.faults():
        growth = "no growth" if all(each.settled for each in done.memory) else "growth not settled"
        console.print(f"no errors, {growth}, every token and page accounted for")
