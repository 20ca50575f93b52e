"""Plan the cells of a sweep, their order and their requests before it begins.

A trial measures all arms at one load in succession, then the next load. The arms' order rotates and
reverses from one such block to the next, the loads' order from trial to trial. Arms of a block get
the same requests; each trial gets others, so that an interval over trials also covers the choice of
prompts. A pilot on the baseline arm sizes the cells; its figures are saved in `run.json`, so that a
resumed sweep plans the same cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.cell import CellPlan, CellPrompt
from sglang_dspark.loadtest.client.mixes import Mix
from sglang_dspark.loadtest.client.replay import Material, Replay
from sglang_dspark.loadtest.client.schedule import (
    Arrivals,
    ClosedLoop,
    Gamma,
    Poisson,
    Surge,
    make_schedule,
    parse_arrivals,
)
from sglang_dspark.loadtest.client.traces import RecordedLoad, read_trace
from sglang_dspark.loadtest.sweep.config import Burst, OpenLoop, SweepConfig, TraceReplay
from sglang_dspark.loadtest.sweep.run_dir import Loop, Pilot, cell_name
from sglang_dspark.loadtest.sweep.verdict import arm_order

CELL_OVERHEAD_S = 2.5  # start of the load generator, warm-up request, reading of counters
SERVER_START_S = 25.0
_LEAST_ROUNDS = 3  # requests per user: the steady part of a closed loop needs more than two
_LEAST_OPEN = 4  # requests of an open loop
_LIMIT = 8.0  # limit of a cell, times its planned length
_SILENCE_S = 60.0


@dataclass(frozen=True)
class Load:
    """One level of load. level: users, or requests/s; expected_s: its length on the baseline."""

    loop: Loop
    level: float
    arrivals: Arrivals | Replay
    expected_s: float


@dataclass(frozen=True)
class Supply:
    """Source of requests: the mix, its prompts as they are sent, and, for traces, its text as
    token ids."""

    mix: Mix
    prompts: tuple[CellPrompt, ...]
    material: Material | None = None

    def for_traces(self) -> Material:
        """Return the text for traces. Raises DSparkError if there is none."""
        if self.material is None:
            raise DSparkError("a trace's prompts need the target's tokenizer, which is not here")
        return self.material


@dataclass(frozen=True)
class PlannedCell:
    """One cell to be measured. order: its place in the sweep."""

    arm: str
    load: Load
    trial: int
    order: int

    @property
    def name(self) -> str:
        """Return the stem of its files."""
        return cell_name(self.arm, self.load.loop, self.load.level, self.trial)


def pilot_users(config: SweepConfig) -> tuple[int, ...]:
    """Return the users of the pilot's closed loops: the fewest and the most of the sweep."""
    return tuple(sorted({config.concurrency[0], config.concurrency[-1]}))


def pilot_requests(users: int) -> int:
    """Return the number of requests of a pilot's cell."""
    return max(4, _LEAST_ROUNDS * users)


def all_loads(config: SweepConfig, pilot: Pilot) -> list[Load]:
    """List the sweep's loads: closed loops by users, then open ones by rate."""
    loads = [closed_load(config, pilot, users) for users in config.concurrency]
    for share in config.open.load:
        loads.append(steady_load(config.open, pilot, rate_of(pilot, share), config.seconds))
    for given in config.open.arrivals:
        loads.append(_given_load(config, given))
    if config.open.burst is not None:
        loads.append(_burst_load(pilot, config.open.burst))
    if config.open.trace is not None:
        loads.append(trace_load(config, config.open.trace))
    names = [(load.loop, f"{load.level:g}") for load in loads]
    if len(set(names)) < len(names):
        raise DSparkError("two open loads have the same rate; write each once")
    return loads


def closed_load(config: SweepConfig, pilot: Pilot, users: int) -> Load:
    """Size a closed loop that the baseline serves in about `config.seconds`."""
    rate = _interpolated(pilot.tokens_per_s, users) / _interpolated(pilot.answer_tokens, users)
    requests = max(_LEAST_ROUNDS * users, round(config.seconds * rate))
    return Load("closed", users, ClosedLoop(users=users, requests=requests), requests / rate)


def interleaved(
    config: SweepConfig, loads: Sequence[Load], trials: Sequence[int], first: int = 0
) -> list[PlannedCell]:
    """Order the cells of all loads and trials. first: place of the first cell."""
    cells: list[PlannedCell] = []
    for trial in trials:
        ordered = list(loads) if trial % 2 == 0 else list(loads)[::-1]
        if config.servers == "in-turn":
            blocks = [(arm, load) for arm in arm_order(config.names, trial) for load in ordered]
        else:
            blocks = [
                (arm, load)
                for number, load in enumerate(ordered)
                for arm in arm_order(config.names, trial + number)
            ]
        for arm, load in blocks:
            cells.append(PlannedCell(arm, load, trial, first + len(cells)))
    return cells


def recorded_load(trace: TraceReplay) -> RecordedLoad:
    """Read the trace's requests to send. Raises DSparkError as `read_trace` does."""
    return read_trace(trace.file, trace.format, first=trace.first, longest=trace.longest)


def trace_load(config: SweepConfig, trace: TraceReplay) -> Load:
    """Build the load of a recorded trace. Raises DSparkError naming file and line if bad."""
    replay = Replay(recorded_load(trace), trace.speed)
    rate = replay.requests / max(replay.seconds, 1.0)
    return Load("open", float(f"{rate:.3g}"), replay, replay.seconds + config.seconds)


def cell_plan(config: SweepConfig, cell: PlannedCell, supply: Supply) -> CellPlan:
    """Plan the requests of one cell; equal for all arms but for `models`."""
    load, prompts = cell.load, supply.prompts
    seed = int(
        np.random.SeedSequence(
            [config.seed, cell.trial, int(load.loop == "open"), round(1e6 * load.level)]
        ).generate_state(1)[0]
    )
    replayed = isinstance(load.arrivals, Replay)
    if isinstance(load.arrivals, Replay):
        schedule = load.arrivals.schedule()
        prompts = load.arrivals.prompts(supply.for_traces(), seed)
    else:
        schedule = make_schedule(load.arrivals, supply.mix.groups, config.answer_tokens, seed)
    return CellPlan(
        config.api,
        prompts,
        schedule,
        temperature=config.temperature,
        ignore_eos=config.ignore_eos or replayed,  # its answers are as long as recorded
        silence_s=_SILENCE_S,
        limit_s=_LIMIT * load.expected_s + _SILENCE_S,
        model=config.models.get(cell.arm, ""),
    )


def require_unrepeated(config: SweepConfig, cells: Sequence[PlannedCell], supply: Supply) -> None:
    """Raise DSparkError, if `repeats: refuse`, for the first cell that sends a prompt twice."""
    if config.repeats != "refuse":
        return
    checked: set[tuple[Loop, float, int]] = set()
    for cell in cells:
        place = (cell.load.loop, cell.load.level, cell.trial)
        if place in checked:  # arms of a block send the same
            continue
        checked.add(place)
        plan = cell_plan(config, cell, supply)
        if plan.repeats:
            raise DSparkError(
                f"cell {cell.name}: {plan.repeats} of {len(plan.schedule.arrivals)} requests "
                f"repeat a whole prompt of the mix {config.mix}; give it more prompts, shorten "
                "`seconds`, or write `repeats: note`"
            )


def rough_seconds(config: SweepConfig, servers: int) -> tuple[int, float]:
    """Estimate the number of cells and the seconds of a sweep, all arms as fast as the baseline.

    servers: number of servers started. Cells that the SLA search adds are not included. Raises
    DSparkError for arrivals that cannot be read, such as a missing trace.
    """
    given = [_given_load(config, each) for each in config.open.arrivals]
    given += [trace_load(config, config.open.trace)] if config.open.trace is not None else []
    others = len(config.concurrency) + len(config.open.load)
    longer = [load.expected_s for load in given]
    if (burst := config.open.burst) is not None:
        longer.append(burst.before_s + burst.burst_s + burst.after_s + config.seconds)
    cells = len(config.arms) * config.trials * (others + len(longer))
    load_s = others * config.seconds + sum(longer)
    starts = servers * (config.trials if config.servers == "in-turn" else 1)
    per_start = SERVER_START_S + (config.seconds if config.warm_up else 0.0)
    seconds = starts * per_start + cells * CELL_OVERHEAD_S
    return cells, seconds + len(config.arms) * config.trials * load_s


def describe(loads: Sequence[Load]) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the plan's table: load, requests of a cell, seconds of a cell."""
    for load in loads:
        unit = "users" if load.loop == "closed" else "requests/s"
        requests = getattr(load.arrivals, "requests", None)
        yield f"{load.level:g} {unit}", str(requests or "as given"), f"{load.expected_s:.0f}"


def _capacity(pilot: Pilot) -> tuple[float, float]:
    """Return the baseline's requests/s at the most users, and the seconds of one request."""
    most = max(pilot.tokens_per_s)
    rate = pilot.tokens_per_s[most] / pilot.answer_tokens[most]
    return rate, most / rate


def _burst_load(pilot: Pilot, burst: Burst) -> Load:
    capacity, tail = _capacity(pilot)
    surge = Surge(
        rate=float(f"{burst.load * capacity:.3g}"),
        factor=burst.factor,
        before_s=burst.before_s,
        burst_s=burst.burst_s,
        after_s=burst.after_s,
    )
    level = float(f"{surge.expected / surge.seconds:.3g}")
    # The queue of the burst may outlast the time after it.
    return Load("open", level, surge, max(surge.seconds, surge.expected / capacity) + tail)


def rate_of(pilot: Pilot, share: float) -> float:
    """Convert a share of the baseline's throughput to requests/s."""
    return float(f"{share * _capacity(pilot)[0]:.3g}")


def steady_load(
    loop: OpenLoop, pilot: Pilot, rate: float, seconds: float, least: int = _LEAST_OPEN
) -> Load:
    """Build arrivals at one rate, for `seconds` and at least `least` requests."""
    tail = _capacity(pilot)[1]
    requests = max(least, round(seconds * rate))
    arrivals: Arrivals = (
        Poisson(rate=rate, requests=requests)
        if loop.kind == "poisson"
        else Gamma(rate=rate, cv=loop.cv, requests=requests)
    )
    return Load("open", rate, arrivals, requests / rate + tail)


def _given_load(config: SweepConfig, given: dict[str, object]) -> Load:
    arrivals = parse_arrivals(given)
    if isinstance(arrivals, ClosedLoop):
        raise DSparkError("open.arrivals: a closed loop belongs under concurrency")
    at = arrivals.times(np.random.default_rng(config.seed))
    seconds = max(float(at[-1]), 1.0)
    return Load("open", float(f"{len(at) / seconds:.3g}"), arrivals, seconds + config.seconds)


def _interpolated(by_users: dict[int, float], users: int) -> float:
    """Interpolate linearly between the logarithms, level outside of the known users."""
    known = sorted(by_users)
    logs = np.interp(
        math.log(users), [math.log(u) for u in known], [math.log(by_users[u]) for u in known]
    )
    return float(math.exp(logs))
