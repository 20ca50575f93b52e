"""End `dspark demo`: a short sweep of its two servers and an MTP-1 one, and its report.

The two servers that have answered the demo's prompts are measured without a restart; only MTP-1's
is started. All loads and lengths are in `configs/sweep/demo.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.extras import not_installed, pip_install
from sglang_dspark.shipped import shipped

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.loadtest.servers.fleet import Place
    from sglang_dspark.loadtest.servers.server import ServerProcess
    from sglang_dspark.loadtest.sweep.config import SweepConfig
    from sglang_dspark.loadtest.sweep.run_dir import Summary

ROOM_GIB = 8  # of memory, for two more servers of the demo's size


def why_no_sweep(device: str) -> str:
    """Return the reason why the demo must end without its sweep, "" if it need not."""
    import psutil

    if missing := not_installed("loadtest"):
        return f"{', '.join(missing)} not installed ({pip_install('loadtest')} in a checkout)"
    if device != "cpu":
        return "it needs several servers side by side; `dspark sweep` with `servers: in-turn` does"
    free = psutil.virtual_memory().available / 2**30
    if free < ROOM_GIB:
        return f"three servers side by side need {ROOM_GIB} GiB of free memory, here are {free:.1f}"
    return ""


def demo_config(port: int, target: Path | None, drafter: Path) -> SweepConfig:
    """Return the sweep of the models that the demo serves. target: None for the demo's own.

    The shipped MTP drafter belongs to the demo's target: on another one that arm is skipped.
    """
    from sglang_dspark.loadtest.sweep.config import Comparison, load_sweep

    config = load_sweep(shipped("configs") / "sweep" / "demo.yaml")
    drafters = {**config.drafters, "dspark": str(drafter)}
    changed: dict[str, Any] = {"port": port, "device": "cpu", "drafters": drafters}
    if target is not None:
        arms = [arm for arm in config.arms if not arm.startswith("mtp")]
        compare = Comparison(over="dspark", under=config.baseline)
        changed |= {"target": str(target), "arms": arms, "compare": compare}
    return config.model_copy(update=changed)


def measured(config: SweepConfig) -> str:
    """Describe what the sweep measures."""
    loads = ", ".join(str(users) for users in config.concurrency)
    return f"{', '.join(config.names)} with {loads} users"


def sweep_extent(target: Path | None) -> tuple[str, float]:
    """Describe what the demo's sweep measures, and estimate its seconds.

    target: as of `demo_config`; two of its servers are running by then.
    """
    from sglang_dspark.loadtest.sweep.plan import rough_seconds
    from sglang_dspark.models.drafters import shipped_drafter_path

    config = demo_config(1, target, shipped_drafter_path())
    _, seconds = rough_seconds(config, len(config.arms) - 2)
    return measured(config), seconds


def sweep_and_report(
    console: Console, config: SweepConfig, running: Mapping[str, ServerProcess], run: Path
) -> Summary:
    """Measure in `run`, show the table and the verdict, write the report and print its path.

    running: servers by arm, frozen, which are used and finally stopped.
    """
    from sglang_dspark.cli._demo_words import SWEEP_WORDS
    from sglang_dspark.cli._sweep_view import SweepView, results_table
    from sglang_dspark.cli.report import write_sweep_report
    from sglang_dspark.cli.sweep import prepare
    from sglang_dspark.loadtest.servers.fleet import Fleet
    from sglang_dspark.loadtest.sweep.run import conduct
    from sglang_dspark.loadtest.sweep.setup import choose_arms

    prepared = prepare(
        console, config, choose_arms(config), run, lambda place: _as_it_runs(place, running)
    )
    work, places = prepared.work, prepared.places
    with Fleet(places, run, config.ready_s, work.cores.server) as fleet:
        for name, server in running.items():
            fleet.adopt(name, server)
        with SweepView(console).live() as view:
            outcome = conduct(
                work, prepared.info, places, prepared.drafters, view, "stop", fleet=fleet
            )
    if outcome.died:
        raise DSparkError(outcome.died)
    console.print(results_table(outcome.summary))
    for line in (*SWEEP_WORDS, *outcome.summary.notes, outcome.summary.verdict):
        console.print(line, soft_wrap=not console.is_terminal, markup=False)
    write_sweep_report(run, run / "report.html")
    console.print(f"\nthe report, for any browser: {run / 'report.html'}", soft_wrap=True)
    return outcome.summary


def _as_it_runs(place: Place, running: Mapping[str, ServerProcess]) -> Place:
    server = running.get(place.arm.name)
    return place if server is None else replace(place, url=server.spec.url, spec=server.spec)
