"""The folder of one sweep: its layout, and typed readers and writers of its files.

    RUN/run.json      configuration, versions and machine (RunInfo)
    RUN/cells/<arm>-<loop>-<level>-<trial>.json       figures of one cell (Cell), written at its end
    RUN/cells/<arm>-<loop>-<level>-<trial>.parquet    its requests (loadtest/client/records_file.py)
    RUN/summary.json  comparisons over all cells (Summary)
    RUN/logs/                                 of the servers; RUN/load/: plan and log of each cell

Every file is written under a temporary name and renamed, so an existing file is complete and a
killed sweep continues with the missing cells. Times are seconds, rates per second; an unknown
figure is null.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.common.files import MOST_RECORDED, load_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.sweep.parts import BurstSummary, HoldSummary, Phase, Within

VERSION = 1
RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
CELLS = "cells"
Loop = Literal["closed", "open"]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Table(_File):
    """A measured table that an arm's server based its decisions on. content: the file's JSON."""

    path: str
    sha256: str
    content: dict[str, Any]


class ArmRecord(_File):
    """One server of the sweep.

    gamma: drafts proposed a step, 0 without speculation; config: of this package; drafter,
    drafter_sha256: its folder and the hash of its weights; tables: `costs` (schedule/cost_table.py)
    and `sts` (schedule/calibration.py) where the arm schedules; ready_s: from launch to health.
    """

    name: str
    about: str
    gamma: int
    command: str
    config: dict[str, Any]
    environment: dict[str, str]
    drafter: str | None
    drafter_sha256: str | None
    tables: dict[str, Table] = {}
    ready_s: float | None = None


class Cores(_File):
    """Cores of the servers and the load generator, the latter's scheduling, and the reason.

    Empty lists: all cores, no pinning. realtime: before every ordinary process (SCHED_RR); nice:
    its nice value otherwise.
    """

    server: list[int]
    client: list[int]
    nice: int
    why: str
    realtime: bool = False

    def apply(self, generator: int) -> None:
        """Pin the load generator's process (its id) and set its scheduling.

        Raises OSError if that is not permitted, which `cores.assign_cores` has checked before.
        """
        if self.client:
            os.sched_setaffinity(generator, self.client)
        if self.realtime:
            os.sched_setscheduler(generator, os.SCHED_RR, os.sched_param(1))
        if self.nice:
            os.setpriority(os.PRIO_PROCESS, generator, self.nice)


class Pilot(_File):
    """Figures that size the cells: tokens/s of the baseline arm, tokens of an answer, by users."""

    arm: str
    tokens_per_s: dict[int, float]
    answer_tokens: dict[int, float]


class RunInfo(_File):
    """Everything about a sweep but its figures. started, ended: ISO 8601 in UTC; ended is null
    while it is not complete. plan: the names of all cells in the order of measurement."""

    version: int = VERSION
    name: str
    config: dict[str, Any]
    argv: list[str]
    commit: str
    versions: dict[str, str]
    device: str
    hardware: dict[str, str]
    arms: list[ArmRecord]
    cores: Cores
    pilot: Pilot | None
    plan: list[str]
    started: str
    ended: str | None = None


class Percentiles(_File):
    """Percentiles over requests; of `itl` over tokens."""

    mean: float | None
    p10: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


class Counters(_File):
    """The server's counters at one moment, since its start; those of the scheduler stay empty in
    arms that do not schedule, and are up to a second late.

    at: from the cell's start (negative before it); running, queued: requests; steps: decode steps
    by mode (plain, speculate, ...); skips: steps without a draft by reason; admitted, accepted:
    drafts by position 1..gamma; budget_*: drafts admitted in a step; step_*: measured step time;
    predicted_sum: the model's for the same steps; gain: tokens/s of speculating over plain.
    """

    at: float
    requests: float
    generated: float
    prompt: float
    running: float | None = None
    queued: float | None = None
    steps: dict[str, float] = {}
    skips: dict[str, float] = {}
    fallbacks: float = 0.0
    admitted: list[float] = []
    accepted: list[float] = []
    budget_sum: float = 0.0
    budget_count: float = 0.0
    step_sum: float = 0.0
    step_count: float = 0.0
    predicted_sum: float = 0.0
    gain: float | None = None


class Domain(_File):
    """The part of a cell's answers that belongs to one kind of prompt."""

    ok: int
    speed_p50: float | None
    tau: float | None
    histogram: list[int]


class Cell(_File):
    """Figures of one cell: one arm at one load in one trial.

    level: users of a closed loop, requests/s of an open one; order: place in the plan; attempt:
    0 unless a void cell was measured again; speeds: tokens/s of each answered request;
    step_s: decoding seconds a step, as a client sees it; histogram[n]: verify steps of a request
    that accepted exactly n drafts; verify_length: mean drafts verified a step and request;
    failures: requests by outcome (records.py);
    errors: one message of each outcome; warnings: by kind, oddities of the answers
    (answer_checks.py); lag_ms: client's lateness at p99; void: why the cell must
    not be compared, "" if it may; died: the server ended within it, log_tail then its last lines;
    disagreements: between the client's totals and the server's counters; repeats: requests whose
    whole prompt the cell had sent before; phases: of a cell with a burst;
    within: of a sweep with limits of latency.
    """

    arm: str
    loop: Loop
    level: float
    trial: int
    order: int
    attempt: int
    mix: str
    fingerprint: str
    started: str
    seconds: float
    requests: int
    ok: int
    tokens: int
    tokens_per_s: float | None
    speed: Percentiles
    speeds: list[float]
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    tau: float | None
    steps: int
    accepted: int
    histogram: list[int]
    step_s: float | None
    verify_length: float | None
    domains: dict[str, Domain]
    failures: dict[str, int]
    errors: dict[str, str]
    lag_ms: float
    void: str
    died: bool = False
    log_tail: str = ""
    disagreements: list[str] = []
    before: Counters | None = None
    after: Counters | None = None
    timeline: list[Counters] = []
    repeats: int = 0
    phases: list[Phase] = []
    within: Within | None = None
    warnings: dict[str, str] = {}

    @property
    def name(self) -> str:
        """Return the stem of its files."""
        return cell_name(self.arm, self.loop, self.level, self.trial)


class Interval(_File):
    """Middle (geometric mean over the trials) and its 95% interval; null ends: too few trials."""

    low: float | None
    mid: float
    high: float | None
    values: list[float]


class Level(_File):
    """One arm at one load over all trials that count; void: how many do not."""

    arm: str
    loop: Loop
    level: float
    trials: int
    void: int
    tokens_per_s: Interval | None
    speed_p50: Interval | None
    speed_p10: Interval | None
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tau: float | None
    verify_length: float | None
    on_frontier: bool


class Compared(_File):
    """A paired ratio over / under; what: `tokens_per_s` or `speed_p50`; said: it as a sentence."""

    over: str
    under: str
    what: str
    loop: Loop
    level: float
    low: float | None
    mid: float
    high: float | None
    trials: int
    method: str
    winner: str
    said: str


class MatchedLevel(_File):
    """Speed per user of `over` over that of `under`, if both deliver `tokens_per_s` in total."""

    level: float
    tokens_per_s: float
    low: float | None
    mid: float
    high: float | None


class MatchedSummary(_File):
    """The paper's comparison. low, mid, high: geometric mean over the levels; null: no level."""

    over: str
    under: str
    levels: list[MatchedLevel]
    low: float | None
    mid: float | None
    high: float | None
    trials: int
    left_out: list[str]
    said: str


class SlaCapacity(_File):
    """Highest throughput that holds the SLA; fields as in `sla.Capacity`."""

    arm: str
    kind: str
    tokens_per_s: float
    load: float
    bracket: tuple[float | None, float | None]
    why: str


class SlaSummary(_File):
    """The limits (speeds in tokens/s/user, TTFT in s) and each arm's capacity under them."""

    speed_p50: float | None
    speed_p10: float | None
    ttft_p95: float | None
    arms: list[SlaCapacity]


class Summary(_File):
    """Comparisons over all cells. label: text that every picture and table must carry, "" if
    none. notes: voids, deaths, warnings, disagreements, cells not measured."""

    version: int = VERSION
    label: str = ""
    verdict: str
    levels: list[Level]
    ratios: list[Compared]
    matched: list[MatchedSummary]
    slas: list[SlaSummary]
    bursts: list[BurstSummary] = []
    hold: HoldSummary | None = None
    notes: list[str]


_Model = TypeVar("_Model", bound=_File)


def cell_name(arm: str, loop: Loop, level: float, trial: int) -> str:
    """Return the stem of a cell's files: `dspark-closed-4-0`, `plain-open-1.25-2`."""
    return f"{arm}-{loop}-{level:g}-{trial}"


def write(path: Path, value: _File) -> None:
    """Write one of the files above atomically. Raises DSparkError if `path` cannot be written."""
    text = json.dumps(value.model_dump(mode="json"), indent=1, allow_nan=False)
    try:
        with replacing(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise DSparkError(f"cannot write {path}: {error.strerror}") from error


def read_run(run: Path) -> RunInfo:
    """Read `run.json`. Raises DSparkError if the folder is no sweep's or of another version."""
    return _read(run / RUN_FILE, RunInfo)


def read_cells(run: Path) -> list[Cell]:
    """Read all finished cells in the order of measurement, void ones included."""
    files = sorted((run / CELLS).glob("*.json"))
    return sorted((_read(path, Cell) for path in files), key=lambda cell: cell.order)


def read_cell(run: Path, name: str) -> Cell | None:
    """Read one cell; None if it was not finished."""
    path = run / CELLS / f"{name}.json"
    return _read(path, Cell) if path.exists() else None


def read_summary(run: Path) -> Summary:
    """Read `summary.json`. Raises DSparkError if the sweep has none yet."""
    return _read(run / SUMMARY_FILE, Summary)


def known(value: float) -> float | None:
    """Return the number, or None for NaN and infinities, which JSON lacks."""
    return value if math.isfinite(value) else None


def _read(path: Path, model: type[_Model]) -> _Model:
    with reading(path, "file of a sweep", "name a sweep's folder"):
        values = load_json(path, most=MOST_RECORDED)
        if isinstance(values, dict) and values.get("version", VERSION) != VERSION:
            raise DSparkError(f"{path} was written by another version; sweep again")
        return model.model_validate(values)
