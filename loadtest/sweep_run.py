"""One sweep from an open folder to its summary: pilot, cells, SLA search, and `run.json` beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sglang_dspark.loadtest import run_dir, sweep_setup
from sglang_dspark.loadtest.fleet import Fleet, Place
from sglang_dspark.loadtest.run_dir import Cell, Pilot, RunInfo, Summary
from sglang_dspark.loadtest.sla import next_load
from sglang_dspark.loadtest.summary import mean_points, summarise
from sglang_dspark.loadtest.sweep import Observer, OnDeath, ServerDiedError, Sweep, Work
from sglang_dspark.loadtest.sweep_config import SweepConfig
from sglang_dspark.loadtest.sweep_plan import (
    Load,
    PlannedCell,
    all_loads,
    closed_load,
    interleaved,
)


class Planner(Observer, Protocol):
    """Who shows the progress, and what is to come."""

    def planned(
        self, loads: Sequence[Load], cells: Sequence[PlannedCell], kept: Sequence[str]
    ) -> None:
        """All cells from here on are known; those named in `kept` are measured already."""


@dataclass(frozen=True)
class Outcome:
    """How a sweep ended. died: what to say of a server that died and stopped it, "" if none."""

    info: RunInfo
    cells: tuple[Cell, ...]
    summary: Summary
    died: str


def conduct(
    work: Work,
    info: RunInfo,
    places: Sequence[Place],
    drafters: Mapping[str, Path],
    observer: Planner,
    on_death: OnDeath,
) -> Outcome:
    """Measure what is missing in `work.run` and write its summary, even where it is cut short.

    info: as `sweep_setup.open_run` gave it. Raises DSparkError as `Sweep` does; what was measured
    by then is kept and summarised.
    """
    died = ""
    with Fleet(places, work.run, work.config.ready_s, work.cores.server) as fleet:
        running = Sweep(work, fleet, observer)
        try:
            info = _with_pilot(work, info, running, on_death)
            _measure(work, info, running, observer, on_death)
        except ServerDiedError as error:
            died = str(error)
        finally:
            info = _keep_arms(work.run, info, sweep_setup.arm_records(places, drafters, fleet))
            summary = _summarised(work.config, work.run, info)
    cells = run_dir.read_cells(work.run)
    if not died and {cell.name for cell in cells} >= set(info.plan):
        info = sweep_setup.finished(info)
        run_dir.write(work.run / run_dir.RUN_FILE, info)
    return Outcome(info, tuple(cells), summary, died)


def _with_pilot(work: Work, info: RunInfo, running: Sweep, on_death: OnDeath) -> RunInfo:
    if info.pilot is not None:
        return info
    running.prepare(work.config.names, on_death)
    pilot = running.pilot()
    cells = interleaved(work.config, all_loads(work.config, pilot), range(work.config.trials))
    info = sweep_setup.planned(info, pilot, [cell.name for cell in cells])
    run_dir.write(work.run / run_dir.RUN_FILE, info)
    return info


def _measure(
    work: Work, info: RunInfo, running: Sweep, observer: Planner, on_death: OnDeath
) -> None:
    assert info.pilot is not None
    loads = all_loads(work.config, info.pilot)
    cells = interleaved(work.config, loads, range(work.config.trials))
    kept = {cell.name for cell in run_dir.read_cells(work.run) if not cell.died}
    observer.planned(loads, cells, sorted(kept))
    running.measure(cells, on_death)
    for _ in range(work.config.search if work.config.slas else 0):
        more = _searched(work.config, info.pilot, run_dir.read_cells(work.run), len(cells))
        if not more:
            break
        cells += more
        observer.planned([], cells, [cell.name for cell in run_dir.read_cells(work.run)])
        running.measure(more, on_death)


def _searched(
    config: SweepConfig, pilot: Pilot, measured: Sequence[Cell], first: int
) -> list[PlannedCell]:
    """The load that tells most about each arm's capacity under each SLA, in all trials."""
    found: dict[str, set[int]] = {}
    for arm in config.names:
        points = mean_points(measured, arm)
        loads = [next_load(points, limits.sla()) for limits in config.slas] if points else []
        known = {point.load for point in points}
        found[arm] = {int(load) for load in loads if load is not None and load not in known}
    cells: list[PlannedCell] = []
    for users in sorted(set().union(*found.values())):
        arms = [arm for arm in config.names if users in found[arm]]
        part = config.model_copy(update={"arms": arms})
        load = closed_load(config, pilot, users)
        cells += interleaved(part, [load], range(config.trials), first + len(cells))
    return cells


def _keep_arms(run: Path, info: RunInfo, arms: list[run_dir.ArmRecord]) -> RunInfo:
    """Add what the servers have told; one that was not started now keeps what it told before."""
    before = {arm.name: arm for arm in info.arms}
    kept = [arm if arm.ready_s is not None else before.get(arm.name, arm) for arm in arms]
    info = info.model_copy(update={"arms": kept})
    run_dir.write(run / run_dir.RUN_FILE, info)
    return info


def _summarised(config: SweepConfig, run: Path, info: RunInfo) -> Summary:
    summary = summarise(config, run_dir.read_cells(run), len(info.plan))
    run_dir.write(run / run_dir.SUMMARY_FILE, summary)
    return summary
