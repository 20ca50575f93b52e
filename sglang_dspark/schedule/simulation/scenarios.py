"""Make cost curves, acceptance traces and requests to run the scheduler without a model.

Curves resemble those of serving: staircases of captured batch tiers with uneven steps, and bent
curves without padding. Traces are requests that start and end, each easy or hard, with conditional
acceptance that drifts from step to step; bursts change their number.

`random_machine` and `random_trace` mix everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.budget import Counts, Gains, Seconds
from sglang_dspark.schedule.cost_table import CostTable, ProfileKey, tokens_curve

TIERS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)


@dataclass(frozen=True)
class Machine:
    """True costs. tokens: [> R (1 + gamma)] seconds by B; draft: [gamma + 1] seconds by depth.

    drift: factor on everything at the end of the trace (1: none), reached linearly.
    knots, padded: as in a profile of it (`CostTable`).
    """

    tokens: Seconds
    draft: Seconds
    knots: tuple[int, ...]
    padded: bool
    drift: float = 1.0

    def seconds(self, tokens: int, depth: int, progress: float) -> float:
        """Return seconds of a step over `tokens` tokens, at `progress` in 0..1 of the trace."""
        factor = 1 + (self.drift - 1) * progress
        return float((self.tokens[tokens] + self.draft[depth]) * factor)

    @property
    def timed(self) -> tuple[int, ...]:
        """Return the batches that a profile times: every tier that batches can be padded to.

        The tier that holds the largest batch is timed with that batch.
        """
        most = len(self.tokens) - 1
        return (*(k for k in self.knots if k < most), most)

    def profile(self, rng: np.random.Generator, noise: float) -> CostTable:
        """Return a table as timed at the start, each number off by a factor of about 1 +- noise."""
        knots = self.timed
        exact = self.tokens[list(knots)]
        timed = exact * np.exp(noise * rng.standard_normal(len(exact)))
        draft = self.draft * np.exp(noise * rng.standard_normal(len(self.draft)))
        draft[1:] = np.maximum.accumulate(draft[1:])
        key = ProfileKey("simulated", "", "", "", "", "", "", gamma=len(draft) - 1)
        return CostTable(
            key, knots, tuple(timed.tolist()), self.padded, 0.0, 0.0, (1,), (tuple(draft.tolist()),)
        )


@dataclass(frozen=True)
class Trace:
    """Events step by step: pool rows in use, their generations, conditional acceptance.

    rows[t], generations[t]: [R_t] int64; confidence[t]: [R_t, gamma] float32, calibrated: chance
    that each draft is accepted, given that those before it are.
    """

    rows: tuple[Counts, ...]
    generations: tuple[Counts, ...]
    confidence: tuple[Gains, ...]
    pool_rows: int

    @property
    def steps(self) -> int:
        """Return the length in steps."""
        return len(self.rows)


def random_machine(rng: np.random.Generator, max_requests: int, gamma: int) -> Machine:
    """Make a jagged staircase (two of three) or a bent curve without padding; seconds."""
    base = 0.01 * rng.uniform(0.5, 2.0)
    padded = bool(rng.random() < 2 / 3)
    slope = base * 10 ** rng.uniform(-3.5, -1.0)  # of a token, from memory-bound to steep
    machine = machine_from(rng, max_requests * (gamma + 1), gamma, base, slope, padded)
    return replace(machine, drift=float(rng.choice([1.0, 1.0, rng.uniform(0.8, 1.3)])))


def machine_from(
    rng: np.random.Generator, most: int, gamma: int, base: float, slope: float, padded: bool
) -> Machine:
    """Make a machine without drift.

    base: seconds of the smallest pass; slope: of a token, on average; most: tokens of the largest
    batch; padded: a batch costs as much as its tier.
    """
    knots = tuple(k for k in TIERS if k < most)
    knots = (*knots, *range(knots[-1] + 128, most + 128, 128))
    gaps = np.diff(np.array([0, *knots]))
    uneven = np.asarray(
        rng.gamma(0.5, 2.0, len(knots)) if padded else rng.uniform(0.5, 1.5, len(knots))
    )
    seconds = base + np.cumsum(slope * gaps * uneven)
    per_depth = base * rng.uniform(0.0, 0.02)
    draft = np.asarray(base * rng.uniform(0.02, 0.3) + per_depth * np.arange(gamma + 1), np.float64)
    draft[0] = 0.0
    return Machine(tokens_curve(knots, seconds, padded, most), draft, knots, padded)


def random_trace(rng: np.random.Generator, max_requests: int, gamma: int, steps: int) -> Trace:
    """Make requests of about 100 steps; the load changes, and acceptance in 1 of 3 traces."""
    level = rng.uniform(-0.5, 3.0)  # mean logit of acceptance
    shifted = level + rng.choice([0.0, 0.0, rng.uniform(-2.0, 1.0)])

    def some() -> int:
        return max(1, int(max_requests * rng.uniform(0.3, 1.0)))

    def active(_: int, before: int) -> int:
        if before == 0:
            return some()
        return some() if rng.random() < 0.01 else before

    return trace_from(rng, max_requests, gamma, steps, (level, shifted), active)


def trace_from(
    rng: np.random.Generator,
    max_requests: int,
    gamma: int,
    steps: int,
    levels: tuple[float, float],
    active: Callable[[int, int], int],
) -> Trace:
    """Make requests of about 100 steps.

    levels: mean logit of acceptance in either half. active: requests at step t, given those of the
    step before (0 before the first).
    """
    generations = np.arange(max_requests) + 1
    own = levels[0] + rng.standard_normal(max_requests)
    state = np.zeros((max_requests, gamma))
    count = active(-1, 0)
    rows_of, generations_of, confidence_of = [], [], []
    for t in range(steps):
        mean = levels[0] if t < steps // 2 else levels[1]
        gone = np.flatnonzero(rng.random(max_requests) < 0.01)
        generations[gone] += max_requests
        own[gone] = mean + rng.standard_normal(len(gone))
        count = active(t, count)
        state = 0.6 * state + 0.8 * 0.7 * rng.standard_normal(state.shape)
        logits = own[:, None] + state - 0.1 * np.arange(gamma)
        confidence = (1 / (1 + np.exp(-logits))).astype(np.float32)
        rows = np.arange(count)
        rows_of.append(rows)
        generations_of.append(generations[rows].copy())
        confidence_of.append(np.ascontiguousarray(confidence[rows]))
    return Trace(tuple(rows_of), tuple(generations_of), tuple(confidence_of), max_requests)


def sample_accepted(
    rng: np.random.Generator, confidence: Gains, verified: Counts
) -> NDArray[np.int64]:
    """Sample the drafts accepted, [R], within the verify lengths."""
    kept = rng.random(confidence.shape) < confidence
    position = np.arange(confidence.shape[1])
    kept &= position < verified[:, None]
    return np.cumprod(kept, axis=1).sum(axis=1)
