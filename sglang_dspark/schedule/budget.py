"""Choose K, the drafts that a step admits, by step time and expected tokens (paper, 3.2.3).

Theta = tau / T, with tau = sum_r w_r (1 + sum of admitted a_{r,j}) and T the step's predicted
seconds, draft included. Two rules:

`search` tries every K and every drafting depth and returns the best. It reads all survivals at
once, so they must be those of an earlier step (lag >= 1; 2 with overlap).

`early_stop` is Algorithm 1: it admits the floors first, at any survival, then drafts in descending
order of survival, and stops at the first drop of Theta. So it may use the survivals of the current
step (lag 0). The price of lag 0: on a jagged cost curve it stops before the first jump in cost.

Both use float64 sums in descending order, compiled, in a workspace that is allocated once. On a tie
of Theta `search` keeps the shallower depth, unless drafting deeper costs no more, and then the
smaller K; `early_stop` admits the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.compiled import compiled
from sglang_dspark.schedule.ordering import (
    DIGIT,
    POSITION_BITS,
    gain_of,
    gather_keys,
    sort_descending,
)

Gains = NDArray[np.float32]
Seconds = NDArray[np.float64]
Counts = NDArray[np.int64]


class Budget(NamedTuple):
    """The decision for one step.

    drafts: K, admitted drafts in the batch. depth: draft this many positions; 0 skips the draft.
    theta: expected (weighted) tokens a second. seconds: predicted duration of the step.
    """

    drafts: int
    depth: int
    theta: float
    seconds: float

    @property
    def speculates(self) -> bool:
        """Return whether the step runs the drafter."""
        return self.depth > 0


@dataclass(frozen=True)
class Costs:
    """Predicted seconds of the coming step, for its R requests.

    tokens: [> R (1 + gamma)] float64, seconds of a pass over B tokens, tiers and padding included.
    fixed: the part that does not depend on the decision (requests, context, overhead).
    draft: [gamma + 1] float64, drafting d positions; entry 0 is the cost of skipping, negative if
    a plain step is faster than verifying anchors only.
    """

    tokens: Seconds
    fixed: float
    draft: Seconds


class Workspace:
    """Scratch memory for batches of up to `max_requests`; not shared between threads."""

    def __init__(self, max_requests: int, gamma: int) -> None:
        if max_requests < 1 or not 1 <= gamma < 1 << POSITION_BITS:
            raise ValueError(f"workspace for {max_requests} requests of {gamma} drafts")
        self.max_requests, self.gamma = max_requests, gamma
        self.keys = np.empty(max_requests * gamma, np.int64)
        self.other = np.empty_like(self.keys)
        self.histogram = np.empty((3, DIGIT), np.int64)
        self.full = np.full(max_requests, gamma, np.int64)
        self.zero = np.zeros(max_requests, np.int64)

    def check(self, gains: Gains) -> int:
        """Return R of gains [R, gamma]. Raises ValueError on another dtype, layout or size."""
        rows, gamma = gains.shape
        if gamma != self.gamma or not 1 <= rows <= self.max_requests:
            raise ValueError(f"gains {gains.shape} for [1..{self.max_requests}, {self.gamma}]")
        if gains.dtype != np.float32 or not gains.flags.c_contiguous:
            raise ValueError("gains must be contiguous float32")
        return rows


def search(
    gains: Gains,
    costs: Costs,
    workspace: Workspace,
    *,
    limits: Counts | None = None,
    floors: Counts | None = None,
    base: float | None = None,
    must_draft: bool = False,
) -> Budget:
    """Return the K and depth of largest Theta. gains must be those of an earlier step (see above).

    gains: [R, gamma] float32, w_r a_{r,j}, non-increasing in j. limits: [R] int64, most drafts of
    each request (default gamma). floors: [R] int64 <= limits, drafts admitted at any gain
    (fairness); a step that speculates drafts at least to the largest floor. base: sum of w_r
    (default R). must_draft: skip depth 0 (the guard compares the result with the plain step).
    Raises ValueError if sizes do not match.
    """
    rows = workspace.check(gains)
    if len(costs.tokens) <= rows * (1 + workspace.gamma) or len(costs.draft) <= workspace.gamma:
        raise ValueError(f"costs of {len(costs.tokens)} tokens do not cover {rows} requests")
    found = _search(
        gains.view(np.int32),
        workspace.full[:rows] if limits is None else limits,
        workspace.zero[:rows] if floors is None else floors,
        costs.tokens,
        costs.fixed,
        costs.draft,
        float(rows) if base is None else base,
        must_draft,
        workspace.keys,
        workspace.other,
        workspace.histogram,
    )
    return Budget(*found)


def plain(requests: int, costs: Costs, *, base: float | None = None) -> Budget:
    """Return the budget of a step without drafts: one token for each of R requests."""
    seconds = float(costs.tokens[requests] + costs.fixed + costs.draft[0])
    return Budget(0, 0, (float(requests) if base is None else base) / seconds, seconds)


def early_stop(
    gains: Gains,
    costs: Costs,
    workspace: Workspace,
    *,
    limits: Counts | None = None,
    floors: Counts | None = None,
    base: float | None = None,
    depth: int | None = None,
) -> Budget:
    """Run Algorithm 1 over the current step's gains; arguments as in `search`.

    depth: positions that were drafted (default gamma). The drafts already exist, so their cost is
    part of every T. limits must not exceed it, and limits, floors, base and depth must be fixed
    before drafting. K includes the floors, so `admit` with the same floors admits exactly this
    decision. Raises ValueError if sizes do not match or depth is outside 1 .. gamma.
    """
    rows = workspace.check(gains)
    if len(costs.tokens) <= rows * (1 + workspace.gamma) or len(costs.draft) <= workspace.gamma:
        raise ValueError(f"costs of {len(costs.tokens)} tokens do not cover {rows} requests")
    drafted = workspace.gamma if depth is None else depth
    if not 1 <= drafted <= workspace.gamma:
        raise ValueError(f"a draft of {drafted} positions, gamma is {workspace.gamma}")
    found = _early_stop(
        gains.view(np.int32),
        workspace.full[:rows] if limits is None else limits,
        workspace.zero[:rows] if floors is None else floors,
        costs.tokens,
        costs.fixed + costs.draft[drafted],
        float(rows) if base is None else base,
        workspace.keys,
        workspace.other,
        workspace.histogram,
    )
    return Budget(found[0], drafted, found[1], found[2])


@compiled
def _search(  # type: ignore[no-untyped-def]
    bits, limits, floors, tokens, fixed, draft, base, must_draft, keys, other, histogram
) -> Any:
    rows, gamma = bits.shape
    seconds = tokens[rows] + fixed + draft[0]
    best_k, best_depth, best_tau, best_seconds = 0, 0, base, seconds
    if must_draft:
        best_tau, best_seconds = 0.0, 1.0
    count, forced, forced_gain, deepest = gather_keys(bits, limits, floors, keys)
    if count > 0:
        sort_descending(keys, other, count, histogram)
    for depth in range(max(1, deepest), gamma + 1):
        if depth < gamma and draft[depth] >= draft[depth + 1]:
            continue  # drafting deeper costs no more and offers all of this
        fixed_here = fixed + draft[depth]
        k, tau = forced, base + forced_gain
        seconds = tokens[rows + k] + fixed_here
        if tau * best_seconds > best_tau * seconds:
            best_k, best_depth, best_tau, best_seconds = k, depth, tau, seconds
        for i in range(count):
            key = keys[i]
            if depth < gamma and (key & 255) >= depth:
                continue
            tau += gain_of(key)
            k += 1
            seconds = tokens[rows + k] + fixed_here
            if tau * best_seconds > best_tau * seconds:
                best_k, best_depth, best_tau, best_seconds = k, depth, tau, seconds
    return best_k, best_depth, best_tau / best_seconds, best_seconds


@compiled
def _early_stop(  # type: ignore[no-untyped-def]
    bits, limits, floors, tokens, fixed, base, keys, other, histogram
) -> Any:
    rows = bits.shape[0]
    count, admitted, forced_gain, _ = gather_keys(bits, limits, floors, keys)
    if count > 0:
        sort_descending(keys, other, count, histogram)
    tau, seconds = base + forced_gain, tokens[rows + admitted] + fixed
    for i in range(count):
        next_tau = tau + gain_of(keys[i])
        next_seconds = tokens[rows + admitted + 1] + fixed
        if next_tau * seconds < tau * next_seconds:
            break
        tau, seconds, admitted = next_tau, next_seconds, admitted + 1
    return admitted, tau / seconds, seconds
