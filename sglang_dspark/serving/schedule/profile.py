"""The cost table of a server: read from the cache if it belongs here, else measured (paper, 3.2.3).

Measured at start, smallest batches first, because that is where decisions are close, until all
tiers are done or the time is up; larger batches follow the measured slope. Each figure is the
least of a few repeats: what disturbs a pass only adds to it, and steps under load correct the
table later (`schedule/cost_model.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.cost_table import CostTable, ProfileKey, cache_path, load, save

CONTEXT = 64  # tokens that the made-up requests hold
LONG = 1024  # and once, to learn what context costs
REPEATS = 3
TOKENS = (*range(1, 25), 27, 30, 36, 42, 48, 60, 72, 96, 128, 192, 256)
REQUESTS = (1, 2, 4, 8, 16, 32)
VERIFY_SHARE = 0.6  # of the time; the rest is for drafts
LEAST_KNOTS = 3
# A table that ends before so many full windows, or whose drafts before so many counts of requests,
# was measured on a busy machine.
LEAST_KEPT, LEAST_COUNTS = 2, 4

Tell = Callable[[str], None]


class Passes(Protocol):
    """What a profile runs: the real models (`passes.Passes`), or a machine made up by a test."""

    gamma: int

    @property
    def most_requests(self) -> int:
        """Requests that can be seated at once."""
        ...

    @property
    def longest(self) -> int:
        """Longest context."""
        ...

    def warm_up(self) -> None:
        """Do what only a first pass does."""
        ...

    def verify_seconds(self, drafts: Sequence[int], context: int, repeats: int) -> float:
        """Seconds of a pass that verifies drafts[r] of each request."""
        ...

    def draft_seconds(self, requests: int, depth: int, context: int, repeats: int) -> float:
        """Seconds of drafting `depth` positions for every request."""
        ...


@dataclass(frozen=True)
class Profiled:
    """A table and where it comes from, in words for the log."""

    table: CostTable
    source: str


def table_for(key: ProfileKey, passes: Passes, seconds: float, tell: Tell) -> Profiled:
    """The table of `key`: from the cache, or measured within about `seconds` and cached.

    A cached table that cannot be used, or a cache that cannot be written, is told and does no harm.
    """
    path = cache_path(key)
    if path.exists():
        try:
            return Profiled(load(path, key), f"read from {path}")
        except DSparkError as error:
            tell(f"{error}; measuring again")
    began = time.perf_counter()
    table = measure(key, passes, seconds, tell)
    spent = time.perf_counter() - began
    counts = min(LEAST_COUNTS, sum(count <= passes.most_requests for count in REQUESTS))
    few = table.knots[-1] < LEAST_KEPT * (passes.gamma + 1) or len(table.draft_requests) < counts
    if few and spent > VERIFY_SHARE * seconds:
        return Profiled(table, f"measured in {spent:.1f} s, too few to be kept")
    try:
        save(table, path)
    except DSparkError as error:
        tell(str(error))
        return Profiled(table, f"measured in {spent:.1f} s")
    return Profiled(table, f"measured in {spent:.1f} s, kept in {path}")


def measure(key: ProfileKey, passes: Passes, seconds: float, tell: Tell) -> CostTable:
    """Time real passes for about `seconds`; progress goes to `tell`."""
    tell(f"measuring step times, about {seconds:.0f} s at most")
    passes.warm_up()
    began = time.perf_counter()
    context = min(CONTEXT, passes.longest)
    per_context = _per_context(passes, context)
    per_request = _per_request(passes, context)
    knots: list[int] = []
    costs: list[float] = []
    for tokens in TOKENS:
        drafts = windows(tokens, passes.gamma)
        if len(drafts) > passes.most_requests:
            break
        if len(knots) >= LEAST_KNOTS and time.perf_counter() - began > VERIFY_SHARE * seconds:
            break
        taken = passes.verify_seconds(drafts, context, REPEATS)
        other = len(drafts) * per_request + tokens * context * per_context
        knots.append(tokens)
        costs.append(max(taken - other, 0.1 * taken))
    tell(f"step times up to {knots[-1]} tokens measured, drafts next")
    requests, rows = _drafts(passes, context, began + seconds)
    return CostTable(
        key=key,
        knots=tuple(knots),
        seconds=tuple(costs),
        padded=False,
        per_request=per_request,
        per_context=per_context,
        draft_requests=requests,
        draft_seconds=rows,
    )


def windows(tokens: int, gamma: int) -> list[int]:
    """Drafts of as few requests as hold a pass of that many tokens, spread evenly."""
    requests = -(-tokens // (gamma + 1))
    base, more = divmod(tokens, requests)
    return [base + (r < more) - 1 for r in range(requests)]


def _per_context(passes: Passes, context: int) -> float:
    """Seconds that a token of context adds for a row."""
    long = min(LONG, passes.longest)
    if long <= context:
        return 0.0
    short = passes.verify_seconds([0], context, REPEATS)
    return max(0.0, (passes.verify_seconds([0], long, REPEATS) - short) / (long - context))


def _per_request(passes: Passes, context: int) -> float:
    """Seconds that a request adds to a pass of the same number of tokens."""
    if passes.most_requests <= passes.gamma:
        return 0.0
    together = passes.verify_seconds([passes.gamma], context, REPEATS)
    apart = passes.verify_seconds([0] * (passes.gamma + 1), context, REPEATS)
    return max(0.0, apart - together) / passes.gamma


def _drafts(
    passes: Passes, context: int, deadline: float
) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]:
    """Seconds of drafts by request count and depth; beyond the last count along the last slope."""
    counts: list[int] = []
    rows: list[np.ndarray] = []
    for requests in REQUESTS:
        if requests > passes.most_requests or (counts and time.perf_counter() > deadline):
            break
        taken = [
            passes.draft_seconds(requests, depth, context, REPEATS)
            for depth in range(1, passes.gamma + 1)
        ]
        counts.append(requests)
        rows.append(np.concatenate([[0.0], np.maximum.accumulate(taken)]))
    if passes.most_requests > counts[-1]:
        before = 0.0 * rows[-1] if len(rows) == 1 else rows[-2]
        gap = counts[-1] - (0 if len(rows) == 1 else counts[-2])
        slope = np.maximum(rows[-1] - before, 0.0) / gap
        rows.append(rows[-1] + slope * (passes.most_requests - counts[-1]))
        counts.append(passes.most_requests)
    return tuple(counts), tuple(tuple(float(x) for x in row) for row in rows)
