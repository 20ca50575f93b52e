"""Get the cost table of a server: from the cache if it fits, else measured (paper, 3.2.3).

Measured at start in rounds. The first runs from small batches to large ones, since decisions are
close for small ones, until all tiers are done or its time is up; larger
batches follow the measured slope. Passes and drafts alternate as in serving: a draft
right after another one finds its weights in the cache and needs half the time. Further rounds
repeat the first while there is time and a round still lowers the figures. The least of each
figure counts, as a disturbance only adds to a pass. A machine that slows down for a second then
affects one round of all passes and not all repeats of one, whose figure is compared with its
neighbours'. Steps under load correct the table later (`schedule/cost_model.py`).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from sglang_dspark.common.file_lock import turn
from sglang_dspark.errors import DSparkError
from sglang_dspark.paths import cache_root
from sglang_dspark.schedule.budget import Seconds
from sglang_dspark.schedule.cost_table import (
    CostTable,
    ProfileKey,
    cache_path,
    load,
    monotone,
    save,
)
from sglang_dspark.serving.fallbacks import Fallback

CONTEXT = 64  # tokens of context of the made-up requests
LONG = 1024  # and once, to learn the cost of context
APART = 24  # requests of one token, to learn the cost of a request without its tokens
ROUNDS, ROUNDS_OF_LARGE = 5, 2
SMALL = 48  # tokens of a pass that is measured in every round
SETTLED = 0.99  # stop after a round that keeps more than this share of the small passes' seconds
TOKENS = (*range(1, 25), 27, 30, 36, 42, 48, 60, 72, 96, 128, 192, 256)
REQUESTS = (1, 2, 4, 8, 16, 32)
FIRST_ROUND = 0.6  # of the time at most
LEAST_KNOTS = 3
# A table that ends before this many full windows, or whose drafts end before this many counts of
# requests, was measured on a busy machine.
LEAST_KEPT, LEAST_COUNTS = 2, 4
LOCK = "measuring.lock"  # next to the tables, held by the process that measures; never removed
# Wait for other processes that measure, s: for one to warm up, for some to finish
PATIENCE, OTHERS = 120.0, 8

Log = Callable[[str], None]


class Passes(Protocol):
    """The passes of a profile: the real models (`passes.Passes`), or a test's simulated machine."""

    gamma: int
    most_requests: int  # most that fit the pool at once
    longest: int  # context
    # Tokens that passes are padded to, ascending; empty: passes are not padded.
    tiers: tuple[int, ...]
    depths: tuple[int, ...]  # of drafts with a cost of their own; gamma among them

    def warm_up(self) -> None:
        """Run first passes, which are slower."""
        ...

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        """Return the seconds of a pass that verifies drafts[r] of each request."""
        ...

    def draft_seconds(self, requests: int, depth: int, context: int) -> float:
        """Return the seconds of drafting `depth` positions for every request."""
        ...


@dataclass(frozen=True)
class Profiled:
    """A table, its source for the log, and the fallbacks on the way."""

    table: CostTable
    source: str
    fallbacks: tuple[Fallback, ...] = ()


def table_for(key: ProfileKey, passes: Passes, seconds: float, log: Log) -> Profiled:
    """Return the table of `key`: from the cache, or measured within about `seconds` and cached.

    A fault of a saved table or of the cache is logged in one line: the times are measured again.
    One process measures at a time, and a process that had to wait uses the table that the other
    saved: replicas of a data-parallel server start together, and would time each other.
    """
    kept = _kept(key, log)
    if isinstance(kept, Profiled):
        return kept
    with _alone(seconds, log):
        again = _kept(key, lambda line: None)
        if isinstance(again, Profiled):
            return again
        return _measured(key, passes, seconds, log, kept)


def _measured(
    key: ProfileKey, passes: Passes, seconds: float, log: Log, wrong: tuple[Fallback, ...]
) -> Profiled:
    """Measure a table and save it; wrong: fallbacks so far."""
    began = time.perf_counter()
    table = measure(key, passes, seconds, log)
    spent = time.perf_counter() - began
    if _cut_short(table, passes):
        return Profiled(table, f"measured in {spent:.1f} s, too few to be kept", wrong)
    try:
        path = cache_path(key)
        save(table, path)
    except DSparkError as error:
        log(str(error))
        return Profiled(table, f"measured in {spent:.1f} s", (*wrong, Fallback.TIMES_NOT_SAVED))
    return Profiled(table, f"measured in {spent:.1f} s, kept in {path}", wrong)


@contextmanager
def _alone(seconds: float, log: Log) -> Iterator[None]:
    """Wait until no other process of this user measures step times; without a lock do not wait."""
    waits = partial(log, "waiting: another process measures step times")
    with ExitStack() as held:
        try:
            lock = cache_root() / "sglang-dspark" / "costs" / LOCK
            held.enter_context(turn(lock, PATIENCE + OTHERS * seconds, waits))
        except TimeoutError:
            log("another process still measures step times; these are measured beside it")
        except (OSError, DSparkError):
            pass  # saving there fails too, and is logged then
        yield


def _kept(key: ProfileKey, log: Log) -> Profiled | tuple[Fallback, ...]:
    """Return the table that an earlier start saved; else its fallbacks, () if there is none."""
    try:
        path = cache_path(key)
        if os.path.exists(path):  # unlike Path.exists, False for a folder that may not be entered
            return Profiled(load(path, key), f"read from {path}")
    except DSparkError as error:
        log(str(error))
        return (Fallback.TIMES_REFUSED,)
    return ()


def _cut_short(table: CostTable, passes: Passes) -> bool:
    """Return whether the table is too small for the next start to reuse it."""
    tokens = min(_tokens(passes)[-1], LEAST_KEPT * (passes.gamma + 1))
    counts = min(LEAST_COUNTS, sum(count <= passes.most_requests for count in REQUESTS))
    return table.knots[-1] < tokens or len(table.draft_requests) < counts


def measure(key: ProfileKey, passes: Passes, seconds: float, log: Log) -> CostTable:
    """Time real passes for about `seconds`; report progress to `log`."""
    log(f"measuring step times, about {seconds:.0f} s at most")
    passes.warm_up()
    began = time.perf_counter()
    fastest = FastestTimes(passes)
    for cell in fastest.scales:
        fastest.time(cell)
    knots, drafts = _tokens(passes), _draft_cells(fastest)
    for number, (tokens, draft) in enumerate(itertools.zip_longest(knots, drafts)):
        late = time.perf_counter() - began > FIRST_ROUND * seconds
        if late and number >= max(LEAST_KNOTS, passes.gamma):
            break
        if tokens is not None:
            fastest.time(fastest.window(tokens))
        if draft is not None:
            fastest.time(draft)
    log(f"{len(fastest.seconds)} passes and drafts timed, again for less noise")
    for number in range(1, ROUNDS):
        before = fastest.total(SMALL)
        fastest.again(None if number < ROUNDS_OF_LARGE else SMALL, began + seconds)
        if number >= ROUNDS_OF_LARGE and fastest.total(SMALL) > SETTLED * before:
            break
    return _table(key, fastest)


def _tokens(passes: Passes) -> list[int]:
    """Return the batches that a profile times if it has the time."""
    sizes = passes.tiers or TOKENS
    return [t for t in sizes if len(windows(t, passes.gamma)) <= passes.most_requests]


def _draft_cells(fastest: FastestTimes) -> list[_Draft]:
    """Return the drafts that a profile times if it has the time."""
    passes = fastest.passes
    counts = [requests for requests in REQUESTS if requests <= passes.most_requests]
    return [
        _Draft(requests, depth, fastest.usual) for requests in counts for depth in passes.depths
    ]


@dataclass(frozen=True)
class _Verify:
    """A pass that verifies drafts[r] of each request."""

    drafts: tuple[int, ...]
    context: int

    @property
    def tokens(self) -> int:
        """Return B."""
        return len(self.drafts) + sum(self.drafts)

    def seconds(self, passes: Passes) -> float:
        """Time the pass once."""
        return passes.verify_seconds(self.drafts, self.context)


@dataclass(frozen=True)
class _Draft:
    """A draft of `depth` positions for every request."""

    requests: int
    depth: int
    context: int

    @property
    def tokens(self) -> int:
        """Return the number of drafted tokens."""
        return self.requests * self.depth

    def seconds(self, passes: Passes) -> float:
        """Time the draft once."""
        return passes.draft_seconds(self.requests, self.depth, self.context)


class FastestTimes:
    """The least seconds of each pass and draft so far, in the order of the first round."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.usual = min(CONTEXT, passes.longest)
        self.long = min(LONG, passes.longest)
        self.apart = min(APART, passes.most_requests)
        self.seconds: dict[_Verify | _Draft, float] = {}

    @property
    def scales(self) -> list[_Verify]:
        """Return passes that measure the cost of context, and of a request without its tokens."""
        cells = [_Verify((0,), self.long)] if self.long > self.usual else []
        if self.apart > 1:
            cells += [_Verify((0,) * self.apart, self.usual), self.window(self.apart)]
        return cells

    def window(self, tokens: int) -> _Verify:
        """Return the pass over `tokens` tokens in as few requests as possible."""
        return _Verify(tuple(windows(tokens, self.passes.gamma)), self.usual)

    def time(self, cell: _Verify | _Draft) -> None:
        """Time a pass or draft once more."""
        taken = cell.seconds(self.passes)
        self.seconds[cell] = min(taken, self.seconds.get(cell, taken))

    def again(self, most: int | None, deadline: float) -> None:
        """Time all earlier passes and drafts again, of up to `most` tokens, while there is time."""
        for cell in list(self.seconds):
            if time.perf_counter() > deadline:
                return
            if most is None or cell.tokens <= most:
                self.time(cell)

    def total(self, most: int) -> float:
        """Return the sum of the least seconds of all timed cells of up to `most` tokens."""
        return sum(taken for cell, taken in self.seconds.items() if cell.tokens <= most)

    def of(self, drafts: Sequence[int], context: int | None = None) -> float | None:
        """Return the seconds of a pass; None if it was not timed."""
        return self.seconds.get(_Verify(tuple(drafts), context or self.usual))

    def drafts(self, requests: int) -> Seconds | None:
        """Return seconds by depth, [1 + gamma], non-decreasing; None if a depth was not timed.

        A depth without its own timing costs as much as the next one.
        """
        depths = self.passes.depths
        cells = [_Draft(requests, depth, self.usual) for depth in depths]
        if any(cell not in self.seconds for cell in cells):
            return None
        timed = monotone(np.array([self.seconds[cell] for cell in cells]))
        at = np.searchsorted(depths, np.arange(1, self.passes.gamma + 1))
        return np.concatenate([[0.0], timed[at]])


def _table(key: ProfileKey, fastest: FastestTimes) -> CostTable:
    per_context, per_request = _per_context(fastest), _per_request(fastest)
    knots, costs = [], []
    for tokens in _tokens(fastest.passes):
        drafts = windows(tokens, fastest.passes.gamma)
        taken = fastest.of(drafts)
        if taken is None:
            break
        other = len(drafts) * per_request + tokens * fastest.usual * per_context
        knots.append(tokens)
        costs.append(max(taken - other, 0.1 * taken))
    requests, rows = _drafts(fastest)
    return CostTable(
        key=key,
        knots=tuple(knots),
        seconds=tuple(costs),
        padded=bool(fastest.passes.tiers),
        per_request=per_request,
        per_context=per_context,
        draft_requests=requests,
        draft_seconds=rows,
    )


def windows(tokens: int, gamma: int) -> list[int]:
    """Spread a pass of `tokens` evenly over as few requests as hold it; return drafts of each."""
    requests = -(-tokens // (gamma + 1))
    base, more = divmod(tokens, requests)
    return [base + (r < more) - 1 for r in range(requests)]


def _per_context(fastest: FastestTimes) -> float:
    """Return the seconds that a token of context adds for a row."""
    short, long = fastest.of([0]), fastest.of([0], fastest.long)
    if short is None or long is None or fastest.long <= fastest.usual:
        return 0.0
    return max(0.0, (long - short) / (fastest.long - fastest.usual))


def _per_request(fastest: FastestTimes) -> float:
    """Return the seconds that a request adds to a pass of the same number of tokens."""
    together = windows(fastest.apart, fastest.passes.gamma)
    few, many = fastest.of(together), fastest.of([0] * fastest.apart)
    if few is None or many is None or fastest.apart == len(together):
        return 0.0
    return max(0.0, many - few) / (fastest.apart - len(together))


def _drafts(fastest: FastestTimes) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]:
    """Return seconds of drafts by request count and depth; past the last count by its slope."""
    most = fastest.passes.most_requests
    timed: list[int] = []
    rows: list[Seconds] = []
    for requests in REQUESTS:
        row = fastest.drafts(requests)
        if row is None:
            break
        timed.append(requests)
        rows.append(row)
    if most > timed[-1]:
        before = 0.0 * rows[-1] if len(rows) == 1 else rows[-2]
        gap = timed[-1] - (0 if len(rows) == 1 else timed[-2])
        slope = np.maximum(rows[-1] - before, 0.0) / gap
        rows.append(rows[-1] + slope * (most - timed[-1]))
        timed.append(most)
    return tuple(timed), tuple(tuple(float(x) for x in row) for row in rows)
