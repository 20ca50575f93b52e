"""`dspark demo`: serve one real model with DSPARK and without, on this machine.

All servers are child processes, used by HTTP, so the demo shows what a client of the server sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_dspark.cli._models import (
    DeviceOption,
    ServedDrafterOption,
    ServedTargetOption,
    device_here,
    served_models,
)

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.cli._demo_view import AnswerView
    from sglang_dspark.evaluation.prompts import EvalPrompt
    from sglang_dspark.loadtest.bench.compare import Pair
    from sglang_dspark.loadtest.client.metrics import Completion
    from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec
    from sglang_dspark.loadtest.sweep.run_dir import Summary

_READY_S = 600.0

PortOption = Annotated[
    int, typer.Option(help="Port of the server; with the sweep, the first of three.")
]
FiguresOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the figures to this file.")
]
SweepOption = Annotated[
    bool, typer.Option("--sweep/--no-sweep", help="End with a short load test against MTP-1.")
]
ServeOption = Annotated[
    bool, typer.Option("--serve", help="Only start the DSPARK server and leave it up.")
]


def demo(
    port: PortOption = 30000,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length of an answer.")] = 64,
    per_domain: Annotated[int, typer.Option(min=1, help="Prompts of each domain.")] = 4,
    target: ServedTargetOption = "demo",
    drafter: ServedDrafterOption = "shipped",
    device: DeviceOption = "",
    json_file: FiguresOption = None,
    end_sweep: SweepOption = True,
    serve: ServeOption = False,
) -> None:
    """Serve the demo model with DSPARK and without, show the answers and compare."""
    from rich.console import Console

    from sglang_dspark.cli._progress import says_when_stopped
    from sglang_dspark.loadtest.servers.server import run_directory, stop_on_signals
    from sglang_dspark.loadtest.servers.workload import dspark_server
    from sglang_dspark.ports import require_free_port

    console = Console(highlight=False)
    for each in range(port, port + (1 if serve or not end_sweep else 3)):
        require_free_port("127.0.0.1", each)
    with says_when_stopped(), stop_on_signals():
        device = device_here(device)
        if serve:
            folder, draft, device = served_models(console, target, drafter, device)
            _serve(console, dspark_server(folder, draft, port, device), run_directory())
            return
        stay = _announce(console, target, device, _prompts(per_domain), max_new_tokens, end_sweep)
        folder, draft, device = served_models(console, target, drafter, device)
        given = None if target == "demo" else folder
        with _Servers(console, folder, draft, device, port, stay) as servers:
            pairs = _compare(servers, _prompts(per_domain), max_new_tokens)
            _report(console, pairs, draft, device, json_file)
            summary = _sweep(servers, given, draft, port + 1) if stay else None
            _conclude(console, pairs, summary)


class _Servers:
    """The demo's two servers.

    stay: each is frozen after use, not stopped, until the end; they then have separate ports.
    """

    def __init__(
        self, console: Console, target: Path, drafter: Path, device: str, port: int, stay: bool
    ):
        from sglang_dspark.loadtest.servers.fleet import LOGS
        from sglang_dspark.loadtest.servers.server import run_directory
        from sglang_dspark.loadtest.servers.workload import dspark_server, plain_server

        plain = plain_server(target, port + 1 if stay else port, device)
        specs: tuple[ServerSpec, ...] = (dspark_server(target, drafter, port, device), plain)
        if stay:
            specs = tuple(replace(s, arguments=(*s.arguments, "--enable-metrics")) for s in specs)
        self.console, self.stay, self.specs = console, stay, specs
        self.run = run_directory()
        self._logs = self.run / LOGS if stay else self.run
        self.running: dict[str, ServerProcess] = {}

    @contextmanager
    def up(self, spec: ServerSpec) -> Iterator[None]:
        """Start a server and let it run during the block."""
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
    """Return the name of the machine's device, for a result file."""
    import torch

    from sglang_dspark.common.machine import cpu_description

    return cpu_description() if device == "cpu" else torch.cuda.get_device_name()


def launch(console: Console, spec: ServerSpec, run_dir: Path) -> ServerProcess:
    """Start a server, show its command, wait until it is ready; on failure show the log's end."""
    from rich.text import Text

    from sglang_dspark.cli._progress import stages
    from sglang_dspark.errors import DSparkError
    from sglang_dspark.loadtest.servers.server import ServerProcess

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


def _prompts(per_domain: int) -> list[EvalPrompt]:
    from sglang_dspark.evaluation.prompts import demo_prompts, limit_per_domain

    return limit_per_domain(demo_prompts(), per_domain)


def _compare(servers: _Servers, prompts: list[EvalPrompt], max_new_tokens: int) -> list[Pair]:
    """Send the same prompts to both servers, one server at a time."""
    from sglang_dspark.cli._demo_words import identical
    from sglang_dspark.loadtest.bench.compare import Pair

    dspark, plain = servers.specs
    ours = _answers(servers, dspark, prompts, max_new_tokens)
    theirs = _answers(servers, plain, prompts, max_new_tokens, ours)
    pairs = [Pair(*row) for row in zip(prompts, ours, theirs, strict=True)]
    servers.console.print(f"\n[bold]The plain server's answers: {identical(pairs)}[/]\n")
    return pairs


def _answers(
    servers: _Servers,
    spec: ServerSpec,
    prompts: list[EvalPrompt],
    max_new_tokens: int,
    shown: Sequence[Completion] = (),
) -> list[Completion]:
    """Launch a server, send all prompts one after the other, and show the answers.

    shown: the other server's answers; an equal answer takes one line.
    """
    from sglang_dspark.cli._demo_view import answers, legend
    from sglang_dspark.cli._demo_words import WORDS

    console = servers.console
    with servers.up(spec):
        if spec.name == "dspark":
            for line in (legend(console), *WORDS, ""):
                console.print(line, markup=False)
        label = f"{spec.name}: prompts"
        with answers(console, spec.model, label, len(prompts)) as view:
            return asyncio.run(_ask_all(spec, prompts, max_new_tokens, view, shown))


async def _ask_all(
    spec: ServerSpec,
    prompts: list[EvalPrompt],
    max_new_tokens: int,
    view: AnswerView,
    shown: Sequence[Completion],
) -> list[Completion]:
    from sglang_dspark.loadtest.client.client import Sampling, SGLangClient
    from sglang_dspark.loadtest.servers.workload import render

    done: list[Completion] = []
    async with SGLangClient(spec.url) as client:
        await client.complete("Once upon a time", Sampling(max_new_tokens=8))  # warm-up, not shown
        for index, prompt in enumerate(prompts):
            view.begin(prompt, spec.name == "dspark")
            text = render(spec.model, prompt)
            answer = await client.complete(text, Sampling(max_new_tokens), view.chunk)
            view.finish(answer, shown[index] if shown else None)
            done.append(answer)
    return done


def _report(
    console: Console, pairs: list[Pair], drafter: Path, device: str, json_file: Path | None
) -> None:
    from sglang_dspark.cli._demo_view import acceptance_table, remarks, speed_table
    from sglang_dspark.loadtest.bench.compare import as_metrics
    from sglang_dspark.loadtest.results import write_results
    from sglang_dspark.loadtest.servers.workload import drafter_gamma

    gamma = drafter_gamma(drafter)
    console.print(speed_table(pairs, gamma))
    console.print(acceptance_table(pairs, gamma))
    for line in remarks(pairs):
        console.print(line, markup=False)
    if json_file is not None:
        write_results(json_file, "demo", hardware(device), as_metrics(pairs, gamma))
        console.print(f"figures written to {json_file}")


def _announce(
    console: Console,
    target: str,
    device: str,
    prompts: list[EvalPrompt],
    tokens: int,
    end_sweep: bool,
) -> bool:
    """Print the steps and their time; return whether the sweep will run."""
    from sglang_dspark.cli._demo_sweep import sweep_extent, why_no_sweep
    from sglang_dspark.cli._demo_words import forecast
    from sglang_dspark.models.demo import demo_target_path
    from sglang_dspark.models.source import GGUF_BYTES

    why = why_no_sweep(device) if end_sweep else ""
    sweeps = end_sweep and not why
    own = target == "demo"
    missing = own and not demo_target_path().is_dir()
    extent = sweep_extent(None if own else Path(target)) if sweeps else None
    build_mb = round(GGUF_BYTES / 1e6) if missing else 0
    console.print(forecast(len(prompts), tokens, build_mb, extent), "\n", markup=False)
    if why:
        console.print(f"no sweep at the end: {why}\n", soft_wrap=True)
    return sweeps


def _sweep(servers: _Servers, target: Path | None, drafter: Path, port: int) -> Summary:
    """Run the short load test against MTP-1. target: None for the demo's own; port: of plain."""
    from sglang_dspark.cli._demo_sweep import demo_config, measured, sweep_and_report

    config = demo_config(port, target, drafter)
    servers.console.print(f"\n[bold]A short load test of {measured(config)}[/]")
    return sweep_and_report(servers.console, config, servers.running, servers.run)


def _conclude(console: Console, pairs: list[Pair], summary: Summary | None) -> None:
    """Print the result of the run in one line."""
    from rich.text import Text

    from sglang_dspark.cli._demo_words import from_sweep, identical, in_short, one_user

    found = (None, None) if summary is None else from_sweep(summary, "dspark", "plain")
    line = in_short(one_user(pairs), identical(pairs), *found)
    console.print(Text(f"\n{line}", style="bold"), soft_wrap=not console.is_terminal)


def _serve(console: Console, spec: ServerSpec, run_dir: Path) -> None:
    import time

    from sglang_dspark.errors import DSparkError

    with launch(console, spec, run_dir) as server:
        console.print(f"OpenAI API at {spec.url}/v1; Ctrl-C stops the server")
        while server.alive():
            time.sleep(0.5)
        raise DSparkError(f"the server ended by itself; see {server.log_path}")
