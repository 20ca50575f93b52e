"""`dspark sweep`: compare arms under load, interleaved, with a verdict (the paper's Figure 7).

Exit status: 0 success, 1 an error, 2 a `--require` is not met, 3 a server died and
the sweep stopped, 130 Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_dspark.errors import DSparkError
from sglang_dspark.extras import require_extra

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.loadtest.servers.arms import Arm
    from sglang_dspark.loadtest.servers.fleet import Place
    from sglang_dspark.loadtest.sweep.cells import Work
    from sglang_dspark.loadtest.sweep.config import SweepConfig
    from sglang_dspark.loadtest.sweep.gates import Gate
    from sglang_dspark.loadtest.sweep.plan import Supply
    from sglang_dspark.loadtest.sweep.run import Outcome
    from sglang_dspark.loadtest.sweep.run_dir import RunInfo

_GATE_MISSED, _SERVER_DIED = 2, 3


@dataclass(frozen=True)
class Prepared:
    """A sweep that can begin: its work, the content of `run.json`, and how each arm is served.

    extent: number of cells, and a first estimate of the seconds.
    """

    work: Work
    info: RunInfo
    places: list[Place]
    drafters: dict[str, Path]
    extent: tuple[int, float]


class OnDeath(StrEnum):
    """The reaction to a server that dies within a cell."""

    stop = "stop"
    go_on = "continue"


ConfigOption = Annotated[
    Path | None, typer.Option(help="The sweep: a file, or a name of configs/sweep, as cpu-demo.")
]
UrlOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A server that runs already, as URL or NAME=URL, in place of --config; repeatable."
    ),
]
HoldOption = Annotated[
    str | None,
    typer.Option(
        help="Find each arm's highest arrival rate within limits, as "
        "p95_ttft_ms<=500,p95_tpot_ms<=60."
    ),
]
TrialsOption = Annotated[
    int | None, typer.Option(min=1, help="Trials of every cell. Default: the file's, 3.")
]
SecondsOption = Annotated[
    float | None, typer.Option(min=0.1, help="Length of a cell. Default: the file's, 10.")
]
UsersOption = Annotated[
    str | None,
    typer.Option("--concurrency", help="Users of the closed loops. Default: the file's, 1,2,4,8."),
]
SmokeOption = Annotated[
    bool, typer.Option("--smoke", help="A short one, by the file's `smoke:` section.")
]
RunOption = Annotated[
    Path | None,
    typer.Option(help="Its folder; one that was stopped goes on. Default: new in runs/."),
]
RequireOption = Annotated[
    list[str] | None,
    typer.Option(help="Fail unless this is shown, as dspark>=mtp1@matched:1.3; repeatable."),
]


def sweep(
    config: ConfigOption = None,
    url: UrlOption = None,
    smoke: SmokeOption = False,
    out: RunOption = None,
    require: RequireOption = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the result file.")
    ] = None,
    on_death: Annotated[
        OnDeath, typer.Option(help="When a server dies within a cell.")
    ] = OnDeath.stop,
    port: Annotated[int | None, typer.Option(help="First port, in place of the file's.")] = None,
    concurrency: UsersOption = None,
    trials: TrialsOption = None,
    seconds: SecondsOption = None,
    hold: HoldOption = None,
) -> None:
    """Measure all arms of a sweep under load, compare them, and save everything in one folder."""
    from rich.console import Console

    from sglang_dspark.cli._progress import says_when_stopped
    from sglang_dspark.loadtest.results import require_clean
    from sglang_dspark.loadtest.servers.server import stop_on_signals
    from sglang_dspark.loadtest.sweep.gates import parse_gate

    console = Console(stderr=True, highlight=False)
    wanted, arms = _wanted(config, url or [], smoke)
    wanted = _in_place(
        wanted, hold, concurrency, {"port": port, "trials": trials, "seconds": seconds}
    )
    require_clean(json_file)
    gates = [parse_gate(text, wanted.names) for text in require or ()]
    with says_when_stopped(), stop_on_signals():
        outcome = _conduct(console, wanted, arms, out, on_death)
    status = _conclude(console, wanted, outcome, gates, json_file)
    if status:
        raise typer.Exit(status)


def _wanted(config: Path | None, urls: Sequence[str], smoke: bool) -> tuple[SweepConfig, list[Arm]]:
    """Return the sweep of a file, or of running servers, and its arms."""
    from sglang_dspark.loadtest.servers.ask import ask_server
    from sglang_dspark.loadtest.sweep.config import load_sweep
    from sglang_dspark.loadtest.sweep.served import parse_address, sweep_of
    from sglang_dspark.loadtest.sweep.setup import choose_arms
    from sglang_dspark.shipped import config_file

    if (config is None) == (not urls):
        raise DSparkError("name a sweep with --config, or servers that run with --url, one of both")
    if config is not None:
        found = load_sweep(config_file("sweep", config), smoke)
        return found, choose_arms(found)
    if smoke:
        raise DSparkError(
            "--smoke is of a sweep's file; with --url take --concurrency and --trials"
        )
    addresses = [parse_address(text) for text in urls]
    return sweep_of(addresses, [ask_server(address.url) for address in addresses])


def _in_place(
    config: SweepConfig, hold: str | None, concurrency: str | None, given: dict[str, float | None]
) -> SweepConfig:
    """Return the sweep with the options' values. given: by field, None for options not given."""
    from sglang_dspark.loadtest.sweep.holding import parse_hold
    from sglang_dspark.loadtest.sweep.served import parse_users

    update: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if concurrency is not None:
        update["concurrency"] = parse_users(concurrency)
    if hold is not None:
        update["hold"] = parse_hold(hold, config.hold)
    return config.model_copy(update=update)


def _conduct(
    console: Console,
    config: SweepConfig,
    arms: Sequence[Arm],
    out: Path | None,
    on_death: OnDeath,
) -> tuple[Path, Outcome]:
    from sglang_dspark.cli._sweep_view import SweepView
    from sglang_dspark.loadtest.servers.server import run_directory
    from sglang_dspark.loadtest.sweep import setup as sweep_setup
    from sglang_dspark.loadtest.sweep.run import conduct

    sweep_setup.require_ports(config, arms)
    ready = prepare(console, config, arms, out or run_directory)
    run = ready.work.run
    _announce(console, config, ready.extent, run, ready.info)
    with SweepView(console).live() as view:
        return run, conduct(
            ready.work, ready.info, ready.places, ready.drafters, view, on_death.value
        )


def prepare(
    console: Console,
    config: SweepConfig,
    arms: Sequence[Arm],
    out: Path | Callable[[], Path],
    placed: Callable[[Place], Place] = lambda place: place,
) -> Prepared:
    """Prepare everything that `sweep.run.conduct` needs; start nothing yet.

    out: the sweep's folder, or a function that makes a new one once all else is present; placed:
    changes where an arm is served. Raises DSparkError if something is missing.
    """
    from sglang_dspark.loadtest.sweep import setup as sweep_setup
    from sglang_dspark.loadtest.sweep.cells import Work
    from sglang_dspark.loadtest.sweep.plan import rough_seconds

    require_extra("loadtest")  # otherwise the load's process fails without them, after the warm-up
    launched = sum(arm.name not in config.urls for arm in arms)
    target, drafters, device, words = _models(console, config, arms, served=launched == 0)
    supply = _supply(config, target)
    extent = rough_seconds(config, launched)
    run = out if isinstance(out, Path) else out()
    places = [
        placed(place)
        for place in sweep_setup.place_arms(config, arms, target, drafters, device, run)
    ]
    fresh = sweep_setup.new_run(config, sweep_setup.arm_records(places, drafters), words)
    info = sweep_setup.open_run(run, fresh)
    gammas = {arm.name: sweep_setup.gamma_of(arm, drafters) for arm in arms}
    profiled = sweep_setup.profiled_arms(arms)
    work = Work(config, run, supply, gammas, profiled, info.cores)
    return Prepared(work, info, places, drafters, extent)


def _models(
    console: Console, config: SweepConfig, arms: Sequence[Arm], *, served: bool
) -> tuple[Path, dict[str, Path], str, str]:
    """Return target folder, drafter folders by kind, `cpu` or `cuda`, and the device's name.

    Models are built if needed. served: no server is started; if the servers render the prompts
    too, no file of the target is needed here.
    """
    from sglang_dspark.cli._models import device_here
    from sglang_dspark.cli._workload import target_dir
    from sglang_dspark.common.machine import cpu_description
    from sglang_dspark.loadtest.sweep import setup as sweep_setup

    device = config.device if served and config.device else device_here(config.device)
    words = cpu_description() if device == "cpu" else _gpu()
    if config.golden is not None:
        target, drafters = _golden(console, config.golden, device)
        return target, drafters, device, words
    drafters = sweep_setup.drafter_folders(config, arms)
    afar = served and config.api == "chat"
    target = Path(config.target) if afar else target_dir(config.target, console)
    if config.deeper is not None:
        target, drafters = _deepened(console, target, config.deeper, drafters)
    return target, drafters, device, words


def _golden(console: Console, given: str, device: str) -> tuple[Path, dict[str, Path]]:
    """Return the models of a golden acceptance file; build them if needed, which takes minutes."""
    from sglang_dspark.models.golden import ensure_golden, load_golden

    golden = load_golden(Path(given))
    console.print(f"simulated acceptance: {golden.shape}; {golden.source}")
    made = ensure_golden(golden, device)
    return made.target, made.drafters


def _deepened(
    console: Console, target: Path, times: float, drafters: dict[str, Path]
) -> tuple[Path, dict[str, Path]]:
    """Return the target at `times` its cost and the drafters adapted to it, in the user's cache."""
    from sglang_dspark.cli._progress import stages
    from sglang_dspark.models.padded_target import ensure_deeper, ensure_fitted

    with stages(console) as progress:
        target = ensure_deeper(target, times, progress)
    return target, {kind: ensure_fitted(folder, target) for kind, folder in drafters.items()}


def _gpu() -> str:
    """Return the GPU's name; servers that run already may be on a machine with a GPU, unlike us."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a GPU elsewhere"


def _supply(config: SweepConfig, target: Path) -> Supply:
    """Load the mix's prompts. Raises DSparkError if the target cannot hold a trace's requests."""
    from sglang_dspark.loadtest.client.mixes import cell_prompts, load_mix
    from sglang_dspark.loadtest.servers.workload import render, require_room, trace_material
    from sglang_dspark.loadtest.sweep.plan import Supply

    mix = load_mix(config.mix)
    prompts = cell_prompts(mix, config.api, lambda prompt: render(target, prompt))
    if config.open.trace is None:
        return Supply(mix, prompts)
    from sglang_dspark.cli._workload import open_tokenizer
    from sglang_dspark.loadtest.sweep.plan import recorded_load

    require_room(target, recorded_load(config.open.trace))
    return Supply(mix, prompts, trace_material(mix.prompts, open_tokenizer(target)))


def _announce(
    console: Console, config: SweepConfig, extent: tuple[int, float], run: Path, info: RunInfo
) -> None:
    from sglang_dspark.cli._sweep_view import show_config

    show_config(console, config, *extent)
    for line in (
        f"cores: {info.cores.why}",
        f"folder: {run} (when stopped, the same command with --out {run} goes on)",
    ):
        console.print(line, soft_wrap=True, markup=False)


def _conclude(
    console: Console,
    config: SweepConfig,
    ended: tuple[Path, Outcome],
    gates: list[Gate],
    json_file: Path | None,
) -> int:
    """Show and write the results; return the exit status."""
    from sglang_dspark.cli._sweep_view import burst_tables, results_table
    from sglang_dspark.loadtest.results import write_results
    from sglang_dspark.loadtest.sweep.gates import misses
    from sglang_dspark.loadtest.sweep.result import as_metrics

    run, outcome = ended
    for table in (results_table(outcome.summary), *burst_tables(outcome.summary)):
        console.print(table)
    held = outcome.summary.hold.arms if outcome.summary.hold is not None else []
    for line in (*outcome.summary.notes, *(arm.said for arm in held), outcome.summary.verdict):
        console.print(line, soft_wrap=True, markup=False)
    if json_file is not None:
        metrics: dict[str, Any] = as_metrics(config, outcome.info, outcome.summary)
        write_results(json_file, json_file.stem, outcome.info.device, metrics)
        console.print(f"figures written to {json_file}", soft_wrap=True)
    console.print(f"everything is in {run}; `dspark report {run}` draws it", soft_wrap=True)
    if outcome.died:
        console.print(f"dspark: {outcome.died}", soft_wrap=True, markup=False)
        return _SERVER_DIED
    missed = misses(gates, outcome.cells)
    for line in missed:
        console.print(f"dspark: {line}", soft_wrap=True, markup=False)
    return _GATE_MISSED if missed else 0
