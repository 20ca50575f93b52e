"""Judge a soak: errors, memory, tokens and pages, and whether the last third was slower.

Each judgement is based on a number. Memory is the slope of each process's resident set over the
second half, by Theil and Sen. Samples of one process depend on each other, so the 95% interval is
rather too narrow. Memory grows if the whole interval is above `GROWTH`; in a half of less than
`JUDGED_MIN` minutes it is shown and not judged. Drift is p99 of the last third over that of the
first, which got the same load; blocks of both are drawn together (bootstrap), as a burst is in the
same block of each. The last third is slower if the whole interval is above 1 + `DRIFT`; other work
of the machine widens the interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import theilslopes  # type: ignore[import-untyped]

from sglang_dspark.loadtest.bench.soak_load import THIRDS, SoakLoad
from sglang_dspark.loadtest.client.metrics import SpecStats
from sglang_dspark.loadtest.client.records import INTENDED, Record

DRIFT = 0.05
GROWTH = 0.5  # MiB a minute
JUDGED_MIN = 5.0
BLOCKS = 10  # of a third
_DRAWS = 2000
LATENCIES: dict[str, Callable[[Record], float]] = {
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot,
    "whole answer": lambda record: record.seconds,
}


@dataclass(frozen=True)
class Memory:
    """Resident set of one process. slope, low, high: MiB a minute over the second half, NaN with
    too few samples; first, last: MiB; judged: whether the half was long enough."""

    process: str
    samples: int
    first: float
    last: float
    slope: float
    low: float
    high: float
    judged: bool

    @property
    def grows(self) -> bool:
        """Return whether memory growth is significant."""
        return self.judged and self.low > GROWTH

    @property
    def settled(self) -> bool:
        """Return whether the interval of the slope does not contain the limit."""
        return self.judged and not self.low <= GROWTH < self.high


@dataclass(frozen=True)
class Drift:
    """p99 of a latency, s, in the first and the last third, and their ratio with its interval."""

    latency: str
    first: float
    last: float
    ratio: float
    low: float
    high: float

    @property
    def slower(self) -> bool:
        """Return whether the last third is significantly slower than allowed."""
        return self.low > 1 + DRIFT

    @property
    def held(self) -> bool:
        """Return whether the last third is no slower than allowed; neither is "not settled"."""
        return self.high <= 1 + DRIFT


@dataclass(frozen=True)
class Books:
    """The server's counts after all answers, with the cache emptied. generated: tokens by its
    counter meanwhile; received: tokens of complete answers; broken_off: most tokens of aborted and
    left answers; used_tokens, running, waiting: of its load report; complaints: its log's lines on
    lost memory, and why it could not be queried; alive: whether it still answers a request.
    None: unknown, as the server could not be queried."""

    generated: int | None
    received: int
    broken_off: int
    used_tokens: int | None
    running: int | None
    waiting: int | None
    complaints: tuple[str, ...]
    alive: bool

    def faults(self) -> list[str]:
        """List the counts that disagree."""
        found = []
        if not self.alive:
            found.append("the server does not answer")
        most = self.received + self.broken_off
        if self.generated is not None and not self.received <= self.generated <= most:
            found.append(
                f"the server made {self.generated} tokens; {self.received} came, and at most "
                f"{self.broken_off} more were broken off"
            )
        if self.used_tokens or self.running or self.waiting:
            found.append(
                f"at rest {self.used_tokens} tokens of the pool are in use, "
                f"{self.running} requests run and {self.waiting} wait"
            )
        return [*found, *self.complaints]


@dataclass(frozen=True)
class Soak:
    """A soak's result. outcomes: requests by outcome; capacity: tokens/s of the closed loop before
    it; spec: the server's counts of drafts."""

    load: SoakLoad
    capacity: float
    share: float
    outcomes: dict[str, int]
    ways: int
    tokens: int
    spec: SpecStats
    memory: tuple[Memory, ...]
    drift: tuple[Drift, ...]
    books: Books

    def faults(self) -> list[str]:
        """List the faults found, one line each."""
        failed = {k: n for k, n in self.outcomes.items() if k not in ("ok", *INTENDED)}
        found = [f"{count} requests ended as {name}" for name, count in failed.items()]
        found += [
            f"{each.process} grows by {each.slope:.2f} ({each.low:.2f} to {each.high:.2f}) MiB a "
            "minute"
            for each in self.memory
            if each.grows
        ]
        found += [
            f"p99 of {each.latency} rose by {each.low - 1:.0%} at least"
            for each in self.drift
            if each.slower
        ]
        return found + self.books.faults()

    def as_metrics(self) -> dict[str, Any]:
        """Build the JSON-ready metrics."""
        return {
            "minutes": self.load.seconds / 60,
            "capacity_tokens_per_s": self.capacity,
            "share_of_capacity": self.share,
            "requests_per_s": self.load.rate,
            "burst": {"requests": self.load.burst_size, "every_s": self.load.burst_every_s},
            "requests": sum(self.outcomes.values()),
            "outcomes": self.outcomes,
            "tokens": self.tokens,
            "tau": self.spec.tau,
            "accepted_drafts": self.spec.accepted,
            "memory": [{**asdict(each), "grows": each.grows} for each in self.memory],
            "drift": [
                {**asdict(each), "held": each.held, "slower": each.slower} for each in self.drift
            ],
            "books": asdict(self.books),
            "faults": self.faults(),
            "method": (
                f"RSS: Theil-Sen over the second half, grows above {GROWTH} MiB/min; drift: p99 of "
                f"the last third over the first, same load, bootstrap over {BLOCKS} blocks, "
                f"slower above {DRIFT:.0%}"
            ),
        }


def outcomes_of(records: Sequence[Record]) -> dict[str, int]:
    """Count the requests by outcome."""
    return dict(sorted(Counter(record.outcome for record in records).items()))


def memory_of(process: str, at: Sequence[float], mib: Sequence[float]) -> Memory:
    """Fit a process's memory. at: s from the soak's start; mib: its resident set, [n] both."""
    half = at[-1] / 2 if at else 0.0
    rows = [(t / 60, m) for t, m in zip(at, mib, strict=True) if t >= half]
    judged = len(rows) > 2 and rows[-1][0] - rows[0][0] >= JUDGED_MIN * 0.95
    first, last = (mib[0], mib[-1]) if mib else (float("nan"), float("nan"))
    slope = low = high = float("nan")
    if len(rows) > 2:
        times, sizes = np.array(rows).T
        slope, _, low, high = (float(value) for value in theilslopes(sizes, times, 0.95))
    return Memory(process, len(at), first, last, slope, low, high, judged)


def drift_of(load: SoakLoad, records: Sequence[Record], seed: int = 0) -> list[Drift]:
    """Compare each latency's p99 in the first third with the last one.

    A latency that is missing from a block of either third has no drift.
    """
    found = []
    for name, latency in LATENCIES.items():
        first, last = (_blocks(load, records, third, latency) for third in (0, THIRDS - 1))
        if min(map(len, (*first, *last))):
            found.append(_drift(name, first, last, np.random.default_rng(seed)))
    return found


def _blocks(
    load: SoakLoad, records: Sequence[Record], third: int, latency: Callable[[Record], float]
) -> list[np.ndarray]:
    """Group latencies of complete answers by block of the third in which they were due."""
    blocks: list[list[float]] = [[] for _ in range(BLOCKS)]
    for record in records:
        within = record.due - third * load.third_s
        if record.ok and 0 <= within < load.third_s:
            value = latency(record)
            if not np.isnan(value):
                blocks[int(within / load.third_s * BLOCKS)].append(value)
    return [np.array(block) for block in blocks]


def _drift(
    name: str, first: list[np.ndarray], last: list[np.ndarray], generator: np.random.Generator
) -> Drift:
    def ratio(chosen: Sequence[int]) -> float:
        before, after = (_p99([blocks[i] for i in chosen]) for blocks in (first, last))
        return after / before

    draws = [ratio(generator.integers(0, BLOCKS, BLOCKS).tolist()) for _ in range(_DRAWS)]
    low, high = np.percentile(draws, [2.5, 97.5]).tolist()
    return Drift(name, _p99(first), _p99(last), ratio(range(BLOCKS)), low, high)


def _p99(blocks: Sequence[np.ndarray]) -> float:
    return float(np.percentile(np.concatenate(blocks), 99))
