"""Schedule the requests of a cell, time and prompt of each: seeded, equal for every arm.

Closed loop: a fixed number of users, each sending after its last answer. Open loop: times fixed
beforehand, so that a slow server gets the same load as a fast one and latency counts from the
scheduled time (no coordinated omission). A schedule depends on the seed and the configuration,
never on the arm; `Schedule.fingerprint` proves that the arms of a run got the same load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from sglang_dspark.common.files import FAULTS, parse_json, wrong_fields
from sglang_dspark.errors import DSparkError

Floats = NDArray[np.float64]
PhaseName = Literal["before", "burst", "after"]
PHASES: tuple[PhaseName, ...] = ("before", "burst", "after")
_LANES = 8  # interleaved conversations, so that turns of one are not in flight together


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ClosedLoop(_Frozen):
    """`users` at a time until `requests` have been answered; latency counts from sending."""

    kind: Literal["closed"] = "closed"
    users: int = Field(ge=1)
    requests: int = Field(ge=1)


class Poisson(_Frozen):
    """Independent arrivals at `rate` requests/s."""

    kind: Literal["poisson"] = "poisson"
    rate: float = Field(gt=0)
    requests: int = Field(ge=1)

    def times(self, generator: np.random.Generator) -> Floats:
        """Draw arrival times in s, ascending: [requests]."""
        return np.cumsum(generator.exponential(1 / self.rate, self.requests))


class Gamma(_Frozen):
    """Gamma gaps of mean 1/rate. cv: their coefficient of variation; 1 is Poisson, more bunches."""

    kind: Literal["gamma"] = "gamma"
    rate: float = Field(gt=0)
    cv: float = Field(gt=0)
    requests: int = Field(ge=1)

    def times(self, generator: np.random.Generator) -> Floats:
        """Draw arrival times in s, ascending: [requests]."""
        shape = self.cv**-2
        return np.cumsum(generator.gamma(shape, 1 / (self.rate * shape), self.requests))


class Trace(_Frozen):
    """Times of a recorded load: JSONL whose rows have `at` in seconds. speed 2: twice as fast."""

    kind: Literal["trace"] = "trace"
    path: Path
    speed: float = Field(1.0, gt=0)
    requests: int | None = Field(None, ge=1, description="the first so many; None: all")

    def times(self, generator: np.random.Generator) -> Floats:
        """Read times since the first arrival, s: [n], ascending. Raises DSparkError if invalid."""
        del generator  # nothing is drawn
        at = np.sort(_trace_times(self.path))[: self.requests]
        return (at - at[0]) / self.speed


class Bursts(_Frozen):
    """`size` requests at once, every `every_s` seconds, `count` times."""

    kind: Literal["bursts"] = "bursts"
    size: int = Field(ge=1)
    every_s: float = Field(gt=0)
    count: int = Field(ge=1)

    def times(self, generator: np.random.Generator) -> Floats:
        """Return arrival times in s, ascending: [size * count]."""
        del generator  # nothing is drawn
        return np.repeat(np.arange(self.count) * self.every_s, self.size)


class Ramp(_Frozen):
    """Poisson arrivals whose rate changes linearly from `from_rate` to `to_rate` (requests/s)."""

    kind: Literal["ramp"] = "ramp"
    from_rate: float = Field(ge=0)
    to_rate: float = Field(ge=0)
    seconds: float = Field(gt=0)

    @model_validator(mode="after")
    def _some_load(self) -> Ramp:
        if self.from_rate + self.to_rate == 0:
            raise ValueError("from_rate and to_rate are both 0: no request would be sent")
        return self

    def times(self, generator: np.random.Generator) -> Floats:
        """Draw arrival times in s, ascending, all below `seconds`; at least one."""
        slope = (self.to_rate - self.from_rate) / self.seconds
        total = 0.5 * (self.from_rate + self.to_rate) * self.seconds  # expected arrivals
        # Given their number, arrivals are independent draws from the rate; invert its integral
        # from_rate t + slope t^2 / 2 in the form that also holds where the slope is zero.
        count = max(1, int(generator.poisson(total)))
        mass = np.sort(generator.uniform(0, total, count))
        root = np.sqrt(np.maximum(self.from_rate**2 + 2 * slope * mass, 0.0))
        return 2 * mass / (self.from_rate + root)


class Surge(_Frozen):
    """Poisson arrivals at `rate` requests/s, in between for `burst_s` at `factor` times that."""

    kind: Literal["surge"] = "surge"
    rate: float = Field(gt=0)
    factor: float = Field(10.0, gt=1)
    before_s: float = Field(gt=0)
    burst_s: float = Field(gt=0)
    after_s: float = Field(gt=0)

    @property
    def seconds(self) -> float:
        """Return the length of all three phases, s."""
        return self.before_s + self.burst_s + self.after_s

    @property
    def expected(self) -> float:
        """Return the expected number of requests."""
        return self.rate * (self.before_s + self.factor * self.burst_s + self.after_s)

    def phase(self, at: float) -> PhaseName:
        """Return the phase of an arrival at that time."""
        if at < self.before_s:
            return "before"
        return "burst" if at < self.before_s + self.burst_s else "after"

    def times(self, generator: np.random.Generator) -> Floats:
        """Draw arrival times in s, ascending; at least one in each phase."""
        parts, begin = [], 0.0
        phases = ((self.before_s, 1.0), (self.burst_s, self.factor), (self.after_s, 1.0))
        for seconds, factor in phases:
            count = max(1, int(generator.poisson(self.rate * factor * seconds)))
            parts.append(np.sort(generator.uniform(begin, begin + seconds, count)))
            begin += seconds
        return np.concatenate(parts)


Arrivals = Annotated[
    ClosedLoop | Poisson | Gamma | Trace | Bursts | Ramp | Surge, Field(discriminator="kind")
]


class Lengths(_Frozen):
    """Output tokens of a request, drawn evenly from `low`..`high`, both included."""

    low: int = Field(ge=1, description="fewest tokens")
    high: int = Field(ge=1, description="most tokens")

    @model_validator(mode="after")
    def _ordered(self) -> Lengths:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


@dataclass(frozen=True)
class Arrival:
    """One request. at: seconds from the cell's start, None in a closed loop; prompt: its index."""

    index: int
    at: float | None
    prompt: int
    max_new_tokens: int


@dataclass(frozen=True)
class Schedule:
    """All requests of a cell in order. users: concurrency of a closed loop, None in an open one."""

    arrivals: tuple[Arrival, ...]
    users: int | None

    def fingerprint(self) -> str:
        """Hash every time, prompt and length: equal for arms that got the same load."""
        text = json.dumps([self.users, [list(asdict(a).values()) for a in self.arrivals]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def share(self, worker: int, workers: int) -> tuple[Arrival, ...]:
        """Select the requests of one of several load-generating processes: every `workers`-th."""
        if not 0 <= worker < workers:
            raise ValueError(f"worker {worker} of {workers}")
        return self.arrivals[worker::workers]


def make_schedule(
    arrivals: Arrivals, groups: Sequence[Sequence[int]], lengths: Lengths, seed: int
) -> Schedule:
    """Schedule the requests of a cell.

    groups: prompt indices that belong together in this order (the turns of one conversation); a
    single prompt is a group of one. Each is used once before any is used again, so cells of other
    sizes share their prompts. Raises DSparkError for no prompts or a bad trace.
    """
    if not any(groups):
        raise DSparkError("there is no prompt to send; check the prompt mix")
    # Independent streams: a longer schedule keeps the prompts and lengths of a shorter one.
    of_times, of_prompts, of_lengths = np.random.default_rng(seed).spawn(3)
    if isinstance(arrivals, ClosedLoop):
        times: list[float | None] = [None] * arrivals.requests
    else:
        times = [float(at) for at in arrivals.times(of_times)]
    prompts = _prompt_order(groups, len(times), of_prompts)
    tokens = of_lengths.integers(lengths.low, lengths.high + 1, len(times)).tolist()
    requests = tuple(
        Arrival(index, at, prompt, count)
        for index, (at, prompt, count) in enumerate(zip(times, prompts, tokens, strict=True))
    )
    return Schedule(requests, arrivals.users if isinstance(arrivals, ClosedLoop) else None)


def parse_arrivals(value: object) -> Arrivals:
    """Read arrivals from a mapping of a config file. Raises DSparkError naming the wrong field."""
    try:
        return TypeAdapter[Arrivals](Arrivals).validate_python(value)
    except ValidationError as error:
        raise DSparkError(f"arrivals: {wrong_fields(error)}") from None


def _prompt_order(
    groups: Sequence[Sequence[int]], count: int, generator: np.random.Generator
) -> list[int]:
    """Order prompt indices: [count]. Groups are reshuffled each time all have been used."""
    order: list[int] = []
    while len(order) < count:
        shuffled = [list(groups[i]) for i in generator.permutation(len(groups))]
        for first in range(0, len(shuffled), _LANES):
            lanes = shuffled[first : first + _LANES]
            longest = max(map(len, lanes))
            order += [lane[turn] for turn in range(longest) for lane in lanes if turn < len(lane)]
    return order[:count]


def _trace_times(path: Path) -> Floats:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DSparkError(f"cannot read the trace {path}: {error}") from None
    times: list[float] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            at = float(parse_json(line)["at"])
        except FAULTS:
            raise DSparkError(
                f'{path}, line {number}: expected a JSON object with "at", seconds'
            ) from None
        if not np.isfinite(at):
            raise DSparkError(f"{path}, line {number}: {at} is not a time")
        times.append(at)
    if not times:
        raise DSparkError(f"the trace {path} holds no arrivals")
    return np.array(times, dtype=np.float64)
