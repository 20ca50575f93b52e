"""Random batches and cost curves, and the planner's answers by brute force."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.budget import Costs

Array = NDArray[np.float32]


def random_gains(rng: np.random.Generator, rows: int, gamma: int) -> Array:
    """Survivals [R, gamma]: smooth, or on a coarse grid so that many are equal, with 0 and 1."""
    if rng.random() < 0.5:
        confidence = rng.choice([0.0, 0.25, 0.5, 1.0], (rows, gamma), p=[0.1, 0.2, 0.3, 0.4])
    else:
        confidence = rng.random((rows, gamma))
    return np.cumprod(confidence.astype(np.float32), axis=1, dtype=np.float32)


def random_costs(rng: np.random.Generator, rows: int, gamma: int, *, by_depth: bool) -> Costs:
    """A jagged curve, at times not ascending; a draft costs the same at every depth, or not."""
    steps = rng.exponential(1.0, rows * (gamma + 1) + 1) * (
        rng.random(rows * (gamma + 1) + 1) < 0.3
    )
    tokens = 1.0 + np.cumsum(steps)
    if rng.random() < 0.5:
        rng.shuffle(tokens)
    if by_depth:
        draft = np.concatenate([[0.0], np.sort(rng.exponential(1.0, gamma))])
    else:
        draft = np.concatenate([[0.0], np.full(gamma, rng.exponential(0.5))])
    return Costs(tokens, float(rng.exponential(0.5)), draft)


def all_lengths(rows: int, gamma: int) -> NDArray[np.int64]:
    """Every vector of verify lengths: [(gamma + 1) ** R, R]."""
    return np.array(list(itertools.product(range(gamma + 1), repeat=rows)), np.int64)


def prefix_sums(gains: Array) -> NDArray[np.float64]:
    """[R, gamma + 1] float64: what the first l drafts of a request bring."""
    zeros = np.zeros((len(gains), 1))
    return np.concatenate([zeros, np.cumsum(gains.astype(np.float64), axis=1)], axis=1)


def best_theta(
    gains: Array,
    costs: Costs,
    lengths: NDArray[np.int64],
    *,
    limits: NDArray[np.int64],
    floors: NDArray[np.int64],
    must_draft: bool = False,
) -> float:
    """Largest Theta over every depth and every set of prefixes; depth 0 drafts nothing."""
    rows, gamma = gains.shape
    gained = prefix_sums(gains)[np.arange(rows), lengths].sum(1)  # [candidates]
    seconds = costs.tokens[rows + lengths.sum(1)] + costs.fixed
    best = 0.0 if must_draft else rows / (costs.tokens[rows] + costs.fixed + costs.draft[0])
    for depth in range(max(1, int(floors.max())), gamma + 1):
        allowed = ((lengths <= np.minimum(limits, depth)) & (lengths >= floors)).all(1)
        theta = (rows + gained[allowed]) / (seconds[allowed] + costs.draft[depth])
        best = max(best, float(theta.max()))
    return best


def admitted_by_sorting(
    gains: Array, drafts: int, limits: NDArray[np.int64], floors: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Verify lengths by sorting all candidates: floors, then gain, position, request."""
    rows = len(gains)
    order = sorted(
        (not j < floors[r], 0.0 if j < floors[r] else -float(gains[r, j]), j, r)
        for r in range(rows)
        for j in range(limits[r])
    )
    lengths = np.zeros(rows, np.int64)
    for *_, r in order[:drafts]:
        lengths[r] += 1
    return lengths
