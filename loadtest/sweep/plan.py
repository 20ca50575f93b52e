"""Which cells a sweep measures, in which order, with which requests: fixed before it begins.

A trial measures all arms at a load next to each other, then goes to the next load; the arms' order
rotates and turns round from one such block to the next, the loads' from trial to trial. Arms of a
block get the very same requests; trials get others, so that an interval over trials covers the
choice of prompts too. Sizes come from a pilot on the baseline arm and are kept in `run.json`, which
makes a resumed sweep plan the same cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.cell import CellPlan, CellPrompt
from sglang_dspark.loadtest.client.mixes import Mix
from sglang_dspark.loadtest.client.schedule import (
    Arrivals,
    ClosedLoop,
    Gamma,
    Poisson,
    make_schedule,
    parse_arrivals,
)
from sglang_dspark.loadtest.sweep.config import SweepConfig
from sglang_dspark.loadtest.sweep.run_dir import Loop, Pilot, cell_name
from sglang_dspark.loadtest.sweep.verdict import arm_order

CELL_OVERHEAD_S = 2.5  # start of the load generator, warm-up request, reading of counters
SERVER_START_S = 25.0
_LEAST_ROUNDS = 3  # requests per user: the steady part of a closed loop needs more than two
_LIMIT = 8.0  # a cell may take so many times its planned length
_SILENCE_S = 60.0


@dataclass(frozen=True)
class Load:
    """One level of load. level: users, or requests/s; expected_s: its length on the baseline."""

    loop: Loop
    level: float
    arrivals: Arrivals
    expected_s: float


@dataclass(frozen=True)
class PlannedCell:
    """One cell to be measured. order: its place in the sweep."""

    arm: str
    load: Load
    trial: int
    order: int

    @property
    def name(self) -> str:
        """Stem of its files."""
        return cell_name(self.arm, self.load.loop, self.load.level, self.trial)


def pilot_users(config: SweepConfig) -> tuple[int, ...]:
    """Users of the pilot's closed loops: the fewest and the most of the sweep."""
    return tuple(sorted({config.concurrency[0], config.concurrency[-1]}))


def pilot_requests(users: int) -> int:
    """Requests of a pilot's cell."""
    return max(4, _LEAST_ROUNDS * users)


def all_loads(config: SweepConfig, pilot: Pilot) -> list[Load]:
    """The sweep's loads: closed loops by users, then open ones by rate."""
    loads = [closed_load(config, pilot, users) for users in config.concurrency]
    for share in config.open.load:
        loads.append(_open_load(config, pilot, share))
    for given in config.open.arrivals:
        loads.append(_given_load(config, given))
    names = [(load.loop, f"{load.level:g}") for load in loads]
    if len(set(names)) < len(names):
        raise DSparkError("two open loads have the same rate; write each once")
    return loads


def closed_load(config: SweepConfig, pilot: Pilot, users: int) -> Load:
    """A closed loop that the baseline serves in about `config.seconds`."""
    rate = _interpolated(pilot.tokens_per_s, users) / _interpolated(pilot.answer_tokens, users)
    requests = max(_LEAST_ROUNDS * users, round(config.seconds * rate))
    return Load("closed", users, ClosedLoop(users=users, requests=requests), requests / rate)


def interleaved(
    config: SweepConfig, loads: Sequence[Load], trials: Sequence[int], first: int = 0
) -> list[PlannedCell]:
    """All cells in order. first: place of the first one."""
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


def cell_plan(
    config: SweepConfig, cell: PlannedCell, mix: Mix, prompts: tuple[CellPrompt, ...]
) -> CellPlan:
    """What one cell sends; equal for all arms."""
    load = cell.load
    seed = np.random.SeedSequence(
        [config.seed, cell.trial, int(load.loop == "open"), round(1e6 * load.level)]
    ).generate_state(1)[0]
    schedule = make_schedule(load.arrivals, mix.groups, config.answer_tokens, int(seed))
    return CellPlan(
        config.api,
        prompts,
        schedule,
        temperature=config.temperature,
        ignore_eos=config.ignore_eos,
        silence_s=_SILENCE_S,
        limit_s=_LIMIT * load.expected_s + _SILENCE_S,
    )


def rough_seconds(config: SweepConfig, servers: int) -> tuple[int, float]:
    """Number of cells, and seconds that the sweep takes when every arm is as fast as the baseline.

    servers: how many are started. Cells that the SLA search adds are not in it. Raises DSparkError
    for arrivals that cannot be had, such as a missing trace.
    """
    given = [_given_load(config, each) for each in config.open.arrivals]
    others = len(config.concurrency) + len(config.open.load)
    cells = len(config.arms) * config.trials * (others + len(given))
    load_s = others * config.seconds + sum(load.expected_s for load in given)
    starts = servers * (config.trials if config.servers == "in-turn" else 1)
    per_start = SERVER_START_S + (config.seconds if config.warm_up else 0.0)
    seconds = starts * per_start + cells * CELL_OVERHEAD_S
    return cells, seconds + len(config.arms) * config.trials * load_s


def describe(loads: Sequence[Load]) -> Iterator[tuple[str, str, str]]:
    """Rows of the plan's table: load, requests of a cell, seconds of a cell."""
    for load in loads:
        unit = "users" if load.loop == "closed" else "requests/s"
        requests = getattr(load.arrivals, "requests", None)
        yield f"{load.level:g} {unit}", str(requests or "as given"), f"{load.expected_s:.0f}"


def _open_load(config: SweepConfig, pilot: Pilot, share: float) -> Load:
    most = max(pilot.tokens_per_s)
    capacity = pilot.tokens_per_s[most] / pilot.answer_tokens[most]  # requests/s
    rate = float(f"{share * capacity:.3g}")
    requests = max(4, round(config.seconds * rate))
    arrivals: Arrivals = (
        Poisson(rate=rate, requests=requests)
        if config.open.kind == "poisson"
        else Gamma(rate=rate, cv=config.open.cv, requests=requests)
    )
    tail = pilot.answer_tokens[most] * most / pilot.tokens_per_s[most]  # of the last answers
    return Load("open", rate, arrivals, requests / rate + tail)


def _given_load(config: SweepConfig, given: dict[str, object]) -> Load:
    arrivals = parse_arrivals(given)
    if isinstance(arrivals, ClosedLoop):
        raise DSparkError("open.arrivals: a closed loop belongs under concurrency")
    at = arrivals.times(np.random.default_rng(config.seed))
    seconds = max(float(at[-1]), 1.0)
    return Load("open", float(f"{len(at) / seconds:.3g}"), arrivals, seconds + config.seconds)


def _interpolated(by_users: dict[int, float], users: int) -> float:
    """Linear between the logarithms; level outside."""
    known = sorted(by_users)
    logs = np.interp(
        math.log(users), [math.log(u) for u in known], [math.log(by_users[u]) for u in known]
    )
    return float(math.exp(logs))
