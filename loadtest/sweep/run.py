"""Run one sweep from an open folder to its summary: pilot, cells, SLA search, and `run.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sglang_dspark.loadtest.servers.fleet import Fleet, Place
from sglang_dspark.loadtest.sweep import run_dir
from sglang_dspark.loadtest.sweep import setup as sweep_setup
from sglang_dspark.loadtest.sweep.cells import (
    Observer,
    OnDeath,
    ServerDiedError,
    Sweep,
    Work,
)
from sglang_dspark.loadtest.sweep.config import SweepConfig
from sglang_dspark.loadtest.sweep.holding import next_probes
from sglang_dspark.loadtest.sweep.plan import (
    Load,
    PlannedCell,
    all_loads,
    closed_load,
    interleaved,
    require_unrepeated,
)
from sglang_dspark.loadtest.sweep.run_dir import Cell, Pilot, RunInfo, Summary
from sglang_dspark.loadtest.sweep.sla import next_load
from sglang_dspark.loadtest.sweep.summary import (
    Cells,
    matched_summary,
    mean_points,
    summarise,
)


class Planner(Observer, Protocol):
    """Receiver of progress and of the plan."""

    def planned(
        self, loads: Sequence[Load], cells: Sequence[PlannedCell], kept: Sequence[str]
    ) -> None:
        """Report the plan so far: all known cells; those in `kept` are measured already."""


@dataclass(frozen=True)
class Outcome:
    """The end of a sweep. died: report on the server that died and stopped it, "" if none."""

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
    fleet: Fleet | None = None,
) -> Outcome:
    """Measure the missing cells of `work.run` and write its summary, even if the sweep ends early.

    info: from `sweep_setup.open_run`; fleet: stopped by the caller. Raises DSparkError as `Sweep`
    does; cells measured by then are saved and summarised.
    """
    died = ""
    with ExitStack() as stack:
        if fleet is None:
            own = Fleet(places, work.run, work.config.ready_s, work.cores.server)
            fleet = stack.enter_context(own)
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
    """Measure the configured cells, then trials until the comparison is tight, then searches."""
    config, pilot = work.config, info.pilot
    assert pilot is not None
    loads = all_loads(config, pilot)
    cells = interleaved(config, loads, range(config.trials))
    require_unrepeated(config, cells, work.supply)
    observer.planned(loads, cells, _kept(work.run))
    running.measure(cells, on_death)

    def add(more: list[PlannedCell]) -> None:
        require_unrepeated(config, more, work.supply)
        cells.extend(more)
        observer.planned([], cells, _kept(work.run))
        running.measure(more, on_death)

    trials = config.trials
    while trials < config.most_trials and not _is_tight(config, run_dir.read_cells(work.run)):
        add(interleaved(config, loads, [trials], len(cells)))
        trials += 1
    for _ in range(config.search):
        more = searched(config, pilot, run_dir.read_cells(work.run), trials, len(cells))
        if not more:
            break
        add(more)
    for _ in range(config.hold.probes if config.hold is not None else 0):
        more = next_probes(config, pilot, run_dir.read_cells(work.run), len(cells))
        if not more:
            break
        add(more)


def _kept(run: Path) -> list[str]:
    return [cell.name for cell in run_dir.read_cells(run) if not cell.died]


def _is_tight(config: SweepConfig, cells: Sequence[Cell]) -> bool:
    """Return whether the configured comparison needs no more trials, or cannot use them."""
    if config.compare is None:
        return True
    found = matched_summary(Cells.of(cells), config.compare.over, config.compare.under)
    if found.mid is None:
        return True
    if found.low is None or found.high is None:
        return False
    return found.high - found.low <= config.tight * found.mid


def searched(
    config: SweepConfig, pilot: Pilot, measured: Sequence[Cell], trials: int, first: int
) -> list[PlannedCell]:
    """Plan the most informative load for each arm's capacity under each SLA, in all trials.

    first: place of the first of these cells. Empty when every bracket is narrow enough.
    """
    found: dict[str, set[int]] = {}
    for arm in config.names:
        points = mean_points(measured, arm)
        loads = [next_load(points, limits.sla()) for limits in config.slas] if points else []
        known = {point.load for point in points}
        found[arm] = {int(load) for load in loads if load is not None and load not in known}
    cells: list[PlannedCell] = []
    for users in sorted(set().union(*found.values())):
        arms = [arm for arm in config.arms if users in found[Path(arm).stem]]
        part = config.model_copy(update={"arms": arms})
        load = closed_load(config, pilot, users)
        cells += interleaved(part, [load], range(trials), first + len(cells))
    return cells


def _keep_arms(run: Path, info: RunInfo, arms: list[run_dir.ArmRecord]) -> RunInfo:
    """Add the servers' reports; an arm that was not started now keeps its earlier report."""
    before = {arm.name: arm for arm in info.arms}
    kept = [arm if arm.ready_s is not None else before.get(arm.name, arm) for arm in arms]
    info = info.model_copy(update={"arms": kept})
    run_dir.write(run / run_dir.RUN_FILE, info)
    return info


def _summarised(config: SweepConfig, run: Path, info: RunInfo) -> Summary:
    summary = summarise(config, run_dir.read_cells(run), len(info.plan))
    run_dir.write(run / run_dir.SUMMARY_FILE, summary)
    return summary
