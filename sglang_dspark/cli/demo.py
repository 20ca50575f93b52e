"""`dspark demo`: one real model, served with DSPARK and without, on this machine.

Everything is a child process and HTTP, so what is shown is what a client of the server sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
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
    from rich.console import Console

    from sglang_dspark.cli._demo_view import AnswerView
    from sglang_dspark.evaluation.prompts import EvalPrompt
    from sglang_dspark.loadtest.compare import Pair
    from sglang_dspark.loadtest.metrics import Completion
    from sglang_dspark.loadtest.server import ServerProcess, ServerSpec

_READY_S = 600.0


def demo(
    port: Annotated[
        int, typer.Option(help="Port of the server; with the sweep, the first of three.")
    ] = 30000,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length of an answer.")] = 64,
    per_domain: Annotated[int, typer.Option(min=1, help="Prompts of each domain.")] = 4,
    target: ServedTargetOption = "demo",
    drafter: ServedDrafterOption = "shipped",
    device: DeviceOption = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
    end_sweep: Annotated[
        bool,
        typer.Option("--sweep/--no-sweep", help="End with a short load test against MTP-1."),
    ] = True,
    serve: Annotated[
        bool, typer.Option("--serve", help="Only start the DSPARK server and leave it up.")
    ] = False,
) -> None:
    """Serve the demo model with DSPARK and without, show the answers and compare."""
    from rich.console import Console

    from sglang_dspark.cli._progress import says_when_stopped
    from sglang_dspark.loadtest.server import run_directory, stop_on_signals
    from sglang_dspark.loadtest.workload import dspark_server
    from sglang_dspark.ports import require_free_port

    console = Console(highlight=False)
    for each in range(port, port + (1 if serve or not end_sweep else 3)):
        require_free_port("127.0.0.1", each)
    with says_when_stopped(), stop_on_signals():
        folder, draft, device = served_models(console, target, drafter, device)
        if serve:
            _serve(console, dspark_server(folder, draft, port, device), run_directory())
            return
        stay = end_sweep and _sweep_fits(console, device)
        with _Servers(console, folder, draft, device, port, stay) as servers:
            pairs = _compare(servers, per_domain, max_new_tokens)
            _report(console, pairs, draft, device, json_file)
            if stay:
                _sweep(servers, None if target == "demo" else folder, draft, port + 1)


class _Servers:
    """The demo's two servers. stay: each is frozen after use, not stopped, until the end; they
    then have ports of their own."""

    def __init__(
        self, console: Console, target: Path, drafter: Path, device: str, port: int, stay: bool
    ):
        from sglang_dspark.loadtest.fleet import LOGS
        from sglang_dspark.loadtest.server import run_directory
        from sglang_dspark.loadtest.workload import dspark_server, plain_server

        plain = plain_server(target, port + 1 if stay else port, device)
        specs = (dspark_server(target, drafter, port, device), plain)
        if stay:
            specs = tuple(replace(s, arguments=(*s.arguments, "--enable-metrics")) for s in specs)
        self.console, self.stay, self.specs = console, stay, specs
        self.run = run_directory()
        self._logs = self.run / LOGS if stay else self.run
        self.running: dict[str, ServerProcess] = {}

    @contextmanager
    def up(self, spec: ServerSpec) -> Iterator[None]:
        """Start it and let it run within."""
        server = launch(self.console, spec, self._logs)
        if not self.stay:
            with server:
                yield
            return
        self.running[spec.name] = server
        yield
        server.pause()

    def __enter__(self) -> _Servers:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.running.values():
            server.stop()


def hardware(device: str) -> str:
    """The machine's device in words, for a result file."""
    import torch

    from sglang_dspark.loadtest.machine import cpu_description

    return cpu_description() if device == "cpu" else torch.cuda.get_device_name()


def launch(console: Console, spec: ServerSpec, run_dir: Path) -> ServerProcess:
    """Start a server, show its command, wait until it is ready; on failure show the log's end."""
    from rich.text import Text

    from sglang_dspark.cli._progress import stages
    from sglang_dspark.errors import DSparkError
    from sglang_dspark.loadtest.server import ServerProcess

    console.print(Text(f"$ {spec.shell_line()}", style="cyan"), soft_wrap=True)
    server = ServerProcess(spec, run_dir).start()
    try:
        with stages(console) as progress:
            took = server.wait_ready(
                _READY_S, lambda _s: progress(f"starting the {spec.name} server", 0, 0)
            )
    except DSparkError:
        console.print(Text(server.log_tail(), style="dim"))
        raise
    except BaseException:
        server.stop()
        raise
    console.print(f"{spec.name} server ready after {took:.0f} s (log: {server.log_path})\n")
    return server


def _compare(servers: _Servers, per_domain: int, max_new_tokens: int) -> list[Pair]:
    """The same prompts on both servers, one server at a time."""
    from sglang_dspark.evaluation.prompts import demo_prompts, limit_per_domain
    from sglang_dspark.loadtest.compare import Pair

    prompts = limit_per_domain(demo_prompts(), per_domain)
    ours, theirs = (_answers(servers, spec, prompts, max_new_tokens) for spec in servers.specs)
    return [Pair(*row) for row in zip(prompts, ours, theirs, strict=True)]


def _answers(
    servers: _Servers, spec: ServerSpec, prompts: list[EvalPrompt], max_new_tokens: int
) -> list[Completion]:
    """Launch, and ask all prompts one after the other with the answers shown."""
    from sglang_dspark.cli._demo_view import answers, legend

    console = servers.console
    with servers.up(spec):
        if spec.name == "dspark":
            console.print(legend(console), "\n")
        label = f"{spec.name}: prompts"
        with answers(console, spec.model, label, len(prompts)) as view:
            return asyncio.run(_ask_all(spec, prompts, max_new_tokens, view))


async def _ask_all(
    spec: ServerSpec, prompts: list[EvalPrompt], max_new_tokens: int, view: AnswerView
) -> list[Completion]:
    from sglang_dspark.loadtest.client import Sampling, SGLangClient
    from sglang_dspark.loadtest.workload import render

    done: list[Completion] = []
    async with SGLangClient(spec.url) as client:
        await client.complete("Once upon a time", Sampling(max_new_tokens=8))  # warm-up, not shown
        for prompt in prompts:
            view.begin(f"[{prompt.id}] {prompt.turns[-1]}", spec.name == "dspark")
            text = render(spec.model, prompt)
            answer = await client.complete(text, Sampling(max_new_tokens), view.chunk)
            view.finish(answer)
            done.append(answer)
    return done


def _report(
    console: Console, pairs: list[Pair], drafter: Path, device: str, json_file: Path | None
) -> None:
    from sglang_dspark.cli._demo_view import acceptance_table, remarks, speed_table
    from sglang_dspark.loadtest.compare import as_metrics
    from sglang_dspark.loadtest.results import write_results
    from sglang_dspark.loadtest.workload import drafter_gamma

    gamma = drafter_gamma(drafter)
    console.print(speed_table(pairs, gamma))
    console.print(acceptance_table(pairs, gamma))
    for line in remarks(pairs):
        console.print(line)
    if json_file is not None:
        write_results(json_file, "demo", hardware(device), as_metrics(pairs, gamma))
        console.print(f"figures written to {json_file}")


def _sweep_fits(console: Console, device: str) -> bool:
    """Whether the short sweep can be made here; if not, the reason is said."""
    from sglang_dspark.cli._demo_sweep import why_no_sweep

    why = why_no_sweep(device)
    if why:
        console.print(f"no sweep at the end: {why}\n", soft_wrap=True)
    return not why


def _sweep(servers: _Servers, target: Path | None, drafter: Path, port: int) -> None:
    """The short load test against MTP-1. target: None for the demo's own; port: of plain."""
    from sglang_dspark.cli._demo_sweep import demo_config, sweep_and_report

    config = demo_config(port, target, drafter)
    loads = ", ".join(str(users) for users in config.concurrency)
    what = f"A short load test of {', '.join(config.names)} with {loads} users"
    servers.console.print(f"\n[bold]{what}[/]")
    sweep_and_report(servers.console, config, servers.running, servers.run)


def _serve(console: Console, spec: ServerSpec, run_dir: Path) -> None:
    import time

    from sglang_dspark.errors import DSparkError

    with launch(console, spec, run_dir) as server:
        console.print(f"OpenAI API at {spec.url}/v1; Ctrl-C stops the server")
        while server.alive():
            time.sleep(0.5)
        raise DSparkError(f"the server ended by itself; see {server.log_path}")
