"""Run a soak on a served model: measure its capacity, send the load, read the server's counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from sglang_dspark.common.files import FAULTS, fault, integer
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.loadtest.bench.soak import (
    Books,
    Memory,
    Soak,
    drift_of,
    memory_of,
    outcomes_of,
)
from sglang_dspark.loadtest.bench.soak_load import WAYS, SoakLoad, capacity_plan, soak_plan
from sglang_dspark.loadtest.client.cell import CellPlan
from sglang_dspark.loadtest.client.client import FLUSH_S
from sglang_dspark.loadtest.client.measure import first_errors, listed_failures
from sglang_dspark.loadtest.client.metrics import SpecStats
from sglang_dspark.loadtest.client.records import INTENDED, Record
from sglang_dspark.loadtest.client.runner import run_cell
from sglang_dspark.loadtest.servers.server import ServerProcess
from sglang_dspark.loadtest.sweep.counters import read_counters

ROUNDS_OF_USERS = 6  # requests of the capacity's closed loop, in rounds of all users
SAMPLES = 240  # of memory, over the whole soak
_LEAST_PAUSE_S = 1.0
_MANY = 1 << 40
_LEAKS = ("memory leak detected", "Mem Leak Detected")


@dataclass
class MemoryWatch:
    """Resident sets of a server's processes, read at most every `pause_s`."""

    server: ServerProcess
    pause_s: float
    began: float = field(default_factory=time.monotonic)
    at: dict[str, list[float]] = field(default_factory=dict)
    mib: dict[str, list[float]] = field(default_factory=dict)
    _next: float = 0.0

    def poll(self) -> None:
        """Read the memory if it is due. Raises DSparkError if the server has died."""
        if not self.server.alive():
            raise DSparkError(f"the server died during the soak; see {self.server.log_path}")
        now = time.monotonic() - self.began
        if now < self._next:
            return
        self._next = now + self.pause_s
        first = psutil.Process(self.server.pid)
        for process in (first, *first.children(recursive=True)):
            try:
                name = f"{process.name()} {process.pid}"
                size = process.memory_info().rss / 2**20
            except psutil.NoSuchProcess:
                continue  # a helper that has just ended
            self.at.setdefault(name, []).append(now)
            self.mib.setdefault(name, []).append(size)

    def memory(self) -> tuple[Memory, ...]:
        """Return the memory of processes in over half of the samples, the largest first."""
        longest = max(map(len, self.at.values()), default=0)
        stayed = [name for name, times in self.at.items() if len(times) > longest // 2]
        found = [memory_of(name, self.at[name], self.mib[name]) for name in stayed]
        return tuple(sorted(found, key=lambda each: -each.last))


@dataclass(frozen=True)
class Asked:
    """Options of a soak. share: of the capacity, which is measured with `users` users."""

    minutes: float
    share: float
    users: int
    seed: int
    prompts: tuple[EvalPrompt, ...]
    render: Callable[[EvalPrompt], str]


def soak(
    server: ServerProcess, asked: Asked, run_dir: Path, say: Callable[[str, int, int], None]
) -> Soak:
    """Run a soak on a running server that was started with `--enable-metrics`.

    run_dir: plans, records and logs of the load generator stay there. say: (stage, done, total).
    Raises DSparkError if the server dies or the load generator fails.
    """
    capacity, rate = _capacity(server, asked, run_dir, say)
    load = SoakLoad(asked.share * rate, 60 * asked.minutes, asked.seed)
    plan = soak_plan(load, asked.prompts, asked.render)
    watch = MemoryWatch(server, max(_LEAST_PAUSE_S, load.seconds / SAMPLES))
    _flush(server)
    before = generated(server.spec.url)

    def poll() -> None:
        watch.poll()
        passed = min(time.monotonic() - watch.began, load.seconds)
        say("soaking", int(passed), int(load.seconds))

    records = run_cell(plan, server.spec.url, _folder(run_dir / "soak"), on_poll=poll).records
    return Soak(
        load=load,
        capacity=capacity,
        share=asked.share,
        outcomes=outcomes_of(records),
        ways=len(WAYS),
        tokens=sum(record.total_tokens for record in records),
        spec=SpecStats.total(record.spec for record in records if record.spec is not None),
        memory=watch.memory(),
        drift=tuple(drift_of(load, [r for r in records if r.sent is not None])),
        books=books(server, plan, records, before),
    )


def books(server: ServerProcess, plan: CellPlan, records: Sequence[Record], before: int) -> Books:
    """Read the server's counts at rest. before: tokens that it had generated until the soak.

    Of a server that has died by then, report the missing answer: the measurements are still saved.
    """
    url = server.spec.url
    made: int | None = None
    load: tuple[int, int, int] | tuple[None, None, None] = (None, None, None)
    unasked: tuple[str, ...] = ()
    alive = False
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as http:
            flushed = http.post("/flush_cache", params={"timeout": FLUSH_S})
            load = _load_report(http)
            made = generated(url) - before
            alive = flushed.status_code == 200 and http.get("/health_generate").status_code == 200
    except (httpx.HTTPError, DSparkError) as error:
        unasked = (f"its accounts cannot be had: {fault(error)}",)
    log = server.log_path.read_text(errors="replace").splitlines()
    return Books(
        generated=made,
        received=sum(record.total_tokens for record in records if record.ok),
        broken_off=sum(
            plan.schedule.arrivals[record.index].max_new_tokens
            for record in records
            if record.outcome in INTENDED
        ),
        used_tokens=load[0],
        running=load[1],
        waiting=load[2],
        complaints=(*unasked, *(line for line in log if any(leak in line for leak in _LEAKS))),
        alive=alive,
    )


def generated(url: str) -> int:
    """Return the number of tokens that the server has generated since its start."""
    with httpx.Client(trust_env=False, timeout=60.0) as http:
        return int(read_counters(http, url, 0.0, 0.0).generated)


def _load_report(http: httpx.Client) -> tuple[int, int, int]:
    """Read the pool's used tokens, requests running and waiting, of all ranks.

    The schedulers report present values here; the gauges of `/metrics` are those of the last batch.
    """
    answer = http.get("/v1/loads")
    try:
        loads = answer.json()["loads"]
        fields = ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")
        used, running, waiting = (
            sum(integer(load[name], 0, _MANY) for load in loads) for name in fields
        )
    except FAULTS as error:
        raise DSparkError(f"{http.base_url}/v1/loads is no load report ({fault(error)})") from None
    return used, running, waiting


def _capacity(
    server: ServerProcess, asked: Asked, run_dir: Path, say: Callable[[str, int, int], None]
) -> tuple[float, float]:
    """Measure tokens/s and requests/s of a closed loop, after another one as a warm-up."""
    found = None
    for name in ("warming up", "measuring the capacity"):
        say(name, 0, 0)
        _flush(server)
        requests = ROUNDS_OF_USERS * asked.users
        plan = capacity_plan(asked.users, requests, asked.prompts, asked.render)
        found = run_cell(plan, server.spec.url, _folder(run_dir / name.replace(" ", "-")))
    assert found is not None
    measured = found.measurement
    if measured.failures or not measured.tokens:
        listed = listed_failures(measured.failures, first_errors(found.records))
        raise DSparkError(f"requests fail without load already: {listed or 'no token came'}")
    return measured.tokens_per_s, measured.tokens_per_s * measured.ok / measured.tokens


def _flush(server: ServerProcess) -> None:
    """Empty the prefix cache: prompts sent before would skip their prefill.

    Raises DSparkError if the server does not answer.
    """
    url = server.spec.url
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as http:
            http.post("/flush_cache", params={"timeout": FLUSH_S})
    except httpx.HTTPError as error:
        raise DSparkError(
            f"{url}/flush_cache does not answer ({fault(error)}); see {server.log_path}"
        ) from error


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
