"""Two requests in one step, in rationals: drafts, confidences, a schedule, the accept rule.

The schedule turns the drafts of both requests into verify lengths through the real planner; the
accept rule runs on a grid of uniforms that holds all its breakpoints. Counting gives the exact
joint distribution of what the batch emits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import prod

import numpy as np
import torch

from tests.verify.chains import (
    AcceptRule,
    Chain,
    Prefix,
    complete,
    draft_distribution,
    emitted_by_cell,
    joint_distribution,
)

GAMMA = 2
Drafts = tuple[Prefix, ...]
Joint = dict[tuple[Prefix, ...], Fraction]
# c_k of a request as a function of its drafts x_1 .. x_k; an honest one ignores x_k.
Confidence = Callable[[Prefix], float]
Schedule = Callable[[np.ndarray], np.ndarray]  # confidence [R, gamma] -> verify lengths [R]


@dataclass(frozen=True)
class Request:
    """A target, a drafter and its confidence head; `argmax` drafts, and the inputs of the rule."""

    target: Chain
    drafter: Chain
    confidence: Confidence
    argmax: bool = False
    claim_sampled: bool = False


def tabled(first: float, second: Mapping[int, float]) -> Confidence:
    """An honest head: c_1 is constant and c_2 depends on x_1 alone."""
    return lambda drafts: first if len(drafts) == 1 else second[drafts[0]]


# The uniforms of a request's step, given its draft and verify length: [N, gamma + 1] and the chance
# of each. An integer is a grid of equal cells, which holds the breakpoints of the token-wise rule.
Cells = Callable[[Request, Prefix, int], tuple[torch.Tensor, list[Fraction]]]
Grid = int | Cells


def _cells(
    grid: Grid, request: Request, draft: Prefix, length: int
) -> tuple[torch.Tensor, list[Fraction]]:
    if not isinstance(grid, int):
        return grid(request, draft, length)
    middles = [(2 * i + 1) / (2 * grid) for i in range(grid)]
    cells = torch.tensor(list(itertools.product(middles, repeat=GAMMA + 1)), dtype=torch.float64)
    return cells, [Fraction(1, len(cells))] * len(cells)


def distribution_given_draft(
    rule: AcceptRule, request: Request, draft: Prefix, length: int, grid: Grid
) -> dict[Prefix, Fraction]:
    """Exact distribution of what one request emits, its draft and verify length given."""
    cells, chances = _cells(grid, request, draft, length)
    count = len(cells)
    tokens = torch.tensor(draft).expand(count, GAMMA)
    # float64: the grid's breakpoints are compared exactly enough even for tenths
    target = torch.tensor(
        [[float(p) for p in request.target(draft[:k])] for k in range(GAMMA + 1)],
        dtype=torch.float64,
    )
    proposal = torch.tensor(
        [[float(p) for p in request.drafter(draft[:k])] for k in range(GAMMA)], dtype=torch.float64
    )
    outcome = rule(
        tokens,
        None if request.argmax and not request.claim_sampled else proposal.expand(count, -1, -1),
        target.expand(count, -1, -1),
        cells[:, :GAMMA],
        cells[:, GAMMA],
        torch.full((count,), length),
    )
    return emitted_by_cell(outcome, tokens, chances)


@cache
def _of_one(
    rule: AcceptRule, request: Request, draft: Prefix, length: int, grid: Grid
) -> dict[Prefix, Fraction]:
    """Distribution of gamma + 1 tokens of one request, its draft and verify length given."""
    emitted = distribution_given_draft(rule, request, draft, length, grid)
    return complete(emitted, request.target, GAMMA + 1)


def _blind(drafts: Prefix) -> float:
    """In place of a confidence where none is asked: requests that differ in it alone are equal."""
    raise AssertionError("lengths are given")


def drafted_pairs(requests: tuple[Request, ...]) -> list[tuple[Fraction, Drafts, np.ndarray]]:
    """All drafts of a batch: chance, draft of each request, confidences [R, gamma] float32."""
    found = []
    distributions = [draft_distribution(q.drafter, GAMMA, q.argmax).items() for q in requests]
    for each in itertools.product(*distributions):
        drafts = tuple(draft for draft, _ in each)
        said = [
            [q.confidence(draft[: k + 1]) for k in range(GAMMA)]
            for q, draft in zip(requests, drafts, strict=True)
        ]
        found.append((prod(share for _, share in each), drafts, np.array(said, np.float32)))
    return found


def batch_probs(
    rule: AcceptRule, requests: tuple[Request, ...], schedule: Schedule, grid: Grid = 12
) -> Joint:
    """Joint distribution of gamma + 1 tokens of every request: one step, then plain decoding."""
    distribution: Joint = {}
    blind = [replace(q, confidence=_blind) for q in requests]
    for chance, drafts, confidence in drafted_pairs(requests):
        lengths = schedule(confidence)
        distributions = [
            _of_one(rule, q, draft, int(length), grid).items()
            for q, draft, length in zip(blind, drafts, lengths, strict=True)
        ]
        for texts in itertools.product(*distributions):
            weight = chance * prod(share for _, share in texts)
            if weight:
                key = tuple(text for text, _ in texts)
                distribution[key] = distribution.get(key, Fraction(0)) + weight
    return distribution


def plain_probs(requests: tuple[Request, ...]) -> Joint:
    """Joint distribution of gamma + 1 tokens of every request by plain decoding."""
    distributions = [joint_distribution(q.target, GAMMA + 1).items() for q in requests]
    joint: Joint = {}
    for texts in itertools.product(*distributions):
        weight = Fraction(1)
        for _, share in texts:
            weight *= share
        if weight:
            joint[tuple(text for text, _ in texts)] = weight
    return joint
