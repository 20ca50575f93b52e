"""Run the sweep: measure every planned cell once, in order, and save each at its end.

Cells on disk are not measured again. A server that dies within a cell makes the cell void, and the
end of its log is reported; the sweep then stops, or restarts the server and continues.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import httpx

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.bodies import PATHS, Sampling, request_body
from sglang_dspark.loadtest.client.cell import CellPlan
from sglang_dspark.loadtest.client.client import FLUSH_S
from sglang_dspark.loadtest.client.records_file import SUFFIX
from sglang_dspark.loadtest.client.runner import RECORDS, CellResult, run_cell
from sglang_dspark.loadtest.client.schedule import ClosedLoop
from sglang_dspark.loadtest.servers.fleet import Fleet
from sglang_dspark.loadtest.sweep import run_dir
from sglang_dspark.loadtest.sweep.config import SweepConfig
from sglang_dspark.loadtest.sweep.counters import read_counters
from sglang_dspark.loadtest.sweep.kept import Sent, Watched, make_cell
from sglang_dspark.loadtest.sweep.plan import (
    Load,
    PlannedCell,
    Supply,
    cell_plan,
    pilot_requests,
    pilot_users,
)
from sglang_dspark.loadtest.sweep.run_dir import CELLS, Cell, Cores, Counters, Pilot

LOAD = "load"
OnDeath = Literal["stop", "continue"]
_WARM_UP_TOKENS = 8
_HTTP_S = 30.0
_DYING_S = 3.0
_SETTLE_S = 0.3  # until SGLang's processes have written their counters


class Observer(Protocol):
    """Receiver of progress."""

    def starting(self, arm: str, seconds: float) -> None:
        """Report that an arm's server is starting, `seconds` so far."""

    def measuring(self, what: str, arm: str) -> None:
        """Report the begin of a cell, a pilot or a warm-up."""

    def measured(self, cell: Cell) -> None:
        """Report a cell that is measured and saved."""

    def troubled(self, arm: str, said: str) -> None:
        """Report a cell that could not be measured. said: the reason, and the reaction."""

    def polled(self) -> None:
        """Update the progress; called several times a second."""


@dataclass(frozen=True)
class Work:
    """State shared by all cells. profiled: arms whose servers time their own steps at the start."""

    config: SweepConfig
    run: Path
    supply: Supply
    gammas: dict[str, int]
    profiled: frozenset[str]
    cores: Cores


class ServerDiedError(DSparkError):
    """A server ended within a cell, in a sweep set to stop on that."""


class Sweep:
    """Run cells on a fleet and report progress to `observer`."""

    def __init__(self, work: Work, fleet: Fleet, observer: Observer):
        self._work, self._fleet, self._observer = work, fleet, observer
        self._lost: set[str] = set()
        self._warm: dict[str, int] = {}  # by arm, the number of the start that was warmed up

    def prepare(self, arms: Sequence[str], on_death: OnDeath) -> None:
        """Start the servers of these arms.

        A server that times its own steps at the start is started alone. Raises DSparkError if a
        server fails to start and `on_death` is `stop`; else its arm is tried again at its turn, and
        skipped if that fails too.
        """
        if self._work.config.servers == "in-turn":
            return
        timed = self._work.profiled
        batches = [[arm for arm in arms if arm not in timed], *([a] for a in arms if a in timed)]
        try:
            for batch in batches:
                self._fleet.ensure(batch, self._observer.starting)
        except DSparkError:
            if on_death == "stop":
                raise

    def pilot(self) -> Pilot:
        """Measure tokens/s of the baseline arm at the fewest and the most users.

        Raises DSparkError if its requests fail: the sweep cannot be planned then.
        """
        arm = self._work.config.baseline
        self._ready(arm)
        speeds: dict[int, float] = {}
        lengths: dict[int, float] = {}
        for users in pilot_users(self._work.config):
            result = self._unkept(arm, "pilot", users, pilot_requests(users))
            found = result.measurement
            if not found.ok or not found.tokens_per_s > 0:
                raise DSparkError(
                    f"the pilot on {arm} failed: {found.void or found.failures}; "
                    f"{self._fleet.log_hint(arm)}"
                )
            speeds[users] = found.tokens_per_s
            lengths[users] = found.tokens / found.ok
        return Pilot(arm=arm, tokens_per_s=speeds, answer_tokens=lengths)

    def measure(self, cells: Sequence[PlannedCell], on_death: OnDeath) -> None:
        """Measure the cells that are not on disk. on_death: `stop` or `continue`.

        Raises ServerDiedError, or DSparkError when a server cannot be started or the load generator
        fails.
        """
        missing = [planned for planned in cells if not self._is_kept(planned)]
        self.prepare(sorted({planned.arm for planned in missing}), on_death)
        for planned in missing:
            if planned.arm in self._lost:
                continue
            if self._work.config.servers == "in-turn":
                self._fleet.stop_others(planned.arm)
            if self._can_serve(planned.arm, on_death):
                self._measure_or_leave(planned, on_death)

    def _is_kept(self, planned: PlannedCell) -> bool:
        kept = run_dir.read_cell(self._work.run, planned.name)
        return kept is not None and not kept.died

    def _can_serve(self, arm: str, on_death: OnDeath) -> bool:
        try:
            self._ready(arm)
        except DSparkError:
            if on_death == "stop":
                raise
            self._lost.add(arm)
            return False
        return True

    def _measure_or_leave(self, planned: PlannedCell, on_death: OnDeath) -> None:
        """Measure a cell; if that fails twice, end the sweep or skip the cell."""
        try:
            self._measure_one(planned, on_death)
        except ServerDiedError:
            raise
        except DSparkError as error:
            if on_death == "stop":
                raise
            self._observer.troubled(planned.arm, f"{planned.name} is skipped: {error}")

    def _measure_one(self, planned: PlannedCell, on_death: OnDeath) -> None:
        for attempt in range(self._work.config.retries + 1):
            self._observer.measuring(planned.name, planned.arm)
            cell = self._cell_or_anew(planned, attempt)
            if not cell.void or cell.died:
                break
        run_dir.write(self._work.run / CELLS / f"{planned.name}.json", cell)
        self._observer.measured(cell)
        if cell.died and on_death == "stop":
            hint = self._fleet.log_hint(planned.arm)
            raise ServerDiedError(
                f"the {planned.arm} server died in cell {planned.name} ({hint}); the same "
                "command with --out goes on, --on-death continue would have"
            )

    def _cell_or_anew(self, planned: PlannedCell, attempt: int) -> Cell:
        """Measure one cell; on failure once more on a new server. Raises DSparkError if both fail.

        The server may not answer (it may hang), or the load generator may fail.
        """
        try:
            return self._cell(planned, attempt)
        except DSparkError as error:
            self._observer.troubled(planned.arm, f"{error}; once more with a new server")
        self._fleet.stop(planned.arm)
        self._ready(planned.arm)
        return self._cell(planned, attempt)

    def _ready(self, arm: str) -> None:
        """Start the arm's server if needed, and warm it up once after each start."""
        self._fleet.ensure([arm], self._observer.starting)
        start = self._fleet.starts.get(arm, 0)
        if self._warm.get(arm) != start and self._work.config.warm_up:
            users = self._work.config.concurrency[-1]
            self._unkept(arm, "warm-up", users, 2 * users)
        self._warm[arm] = start

    def _cell(self, planned: PlannedCell, attempt: int) -> Cell:
        work = self._work
        plan = cell_plan(work.config, planned, work.supply)
        folder = work.run / LOAD / planned.name
        with self._fleet.awake(planned.arm) as url, _http() as http:
            _warm_up(http, url, plan)
            watch = _Watch(http, url, work.config.sample_s, self._observer.polled)
            result = self._run(plan, url, folder, watch.poll)
            watched = watch.finish(result, self._survived(planned.arm, result))
        if watched.died:
            tail = self._fleet.log_tail(planned.arm)
            watched = Watched(watched.before, None, watched.timeline, True, tail)
        for number, records in enumerate(sorted(folder.glob(RECORDS))):
            suffix = f".{number}" if number else ""
            _copy(records, work.run / CELLS / f"{planned.name}{suffix}{SUFFIX}")
        gamma = work.gammas[planned.arm]
        sent = Sent(work.config.mix, plan.repeats, work.config.hold, plan.ignore_eos)
        return make_cell(planned, sent, gamma, attempt, result, watched)

    def _survived(self, arm: str, result: CellResult) -> bool:
        """Return whether the server still runs, after a wait if it closed its connections."""
        suspect = result.measurement.failures.keys() & {"cut", "connection"}
        deadline = time.monotonic() + (_DYING_S if suspect else 0.0)
        while (alive := self._fleet.alive(arm)) and time.monotonic() < deadline:
            time.sleep(_SETTLE_S)
        return alive

    def _unkept(self, arm: str, what: str, users: int, requests: int) -> CellResult:
        """Run a closed loop whose figures enter no comparison."""
        work = self._work
        load = Load("closed", users, ClosedLoop(users=users, requests=requests), 60.0)
        plan = cell_plan(work.config, PlannedCell(arm, load, 10**6, 0), work.supply)
        self._observer.measuring(f"{what} with {users} users", arm)
        with self._fleet.awake(arm) as url, _http() as http:
            _warm_up(http, url, plan)
            folder = work.run / LOAD / f"{what}-{arm}-{users}"
            return self._run(plan, url, folder, self._observer.polled)

    def _run(
        self, plan: CellPlan, url: str, folder: Path, on_poll: Callable[[], None]
    ) -> CellResult:
        return run_cell(plan, url, folder, on_poll=on_poll, cores=self._work.cores)


class _Watch:
    """Reads the server's counters before, within and after a cell."""

    def __init__(
        self, http: httpx.Client, url: str, every_s: float, polled: Callable[[], None]
    ) -> None:
        self._http, self._url, self._every_s, self._polled = http, url, every_s, polled
        self._samples: list[Counters] = []
        self._due = time.time() + every_s
        self._before = self._read()

    def poll(self) -> None:
        self._polled()
        if time.time() >= self._due:
            self._due = time.time() + self._every_s
            sample = self._read()
            if sample is not None:
                self._samples.append(sample)

    def finish(self, result: CellResult, alive: bool) -> Watched:
        """Return all readings, with times from the cell's start, which is known only now."""
        if alive:
            time.sleep(_SETTLE_S)
        after = self._read() if alive else None
        began = result.header.began_unix

        def moved(counters: Counters | None) -> Counters | None:
            if counters is None:
                return None
            return counters.model_copy(update={"at": counters.at - began})

        inside = [each for each in map(moved, self._samples) if each is not None and each.at >= 0]
        return Watched(moved(self._before), moved(after), tuple(inside), died=not alive)

    def _read(self) -> Counters | None:
        """Read the counters; None without an answer (a death is noticed at the cell's end)."""
        try:
            return read_counters(self._http, self._url, 0.0, time.time())
        except DSparkError:
            return None


def _http() -> httpx.Client:
    return httpx.Client(trust_env=False, timeout=_HTTP_S, follow_redirects=True)


def _warm_up(http: httpx.Client, url: str, plan: CellPlan) -> None:
    """Send and discard a short request, then empty SGLang's prefix cache: cells begin alike."""
    sampling = Sampling(_WARM_UP_TOKENS)
    body = request_body(plan.api, plan.prompts[-1].content, sampling, plan.model)
    try:
        http.post(f"{url}{PATHS[plan.api]}", json=body).raise_for_status()
        if not plan.model:
            http.post(f"{url}/flush_cache", params={"timeout": FLUSH_S}).raise_for_status()
    except httpx.HTTPError as error:
        raise DSparkError(f"the server at {url} does not answer ({error}); see its log") from None


def _copy(source: Path, target: Path) -> None:
    with replacing(target) as temporary:
        shutil.copyfile(source, temporary)
