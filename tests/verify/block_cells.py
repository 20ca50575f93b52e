"""Compute exact distributions of the block rule by running it in every cell between breakpoints.

The breakpoints are computed here in rationals, by the definition. Two thin cells surround each, so
that a rule with a breakpoint anywhere else gives another distribution.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch
from torch import Tensor

from tests.verify.chains import (
    AcceptRule,
    Chain,
    Prefix,
    complete,
    emitted_by_cell,
    joint_distribution,
    probabilities,
)

FENCE = Fraction(1, 2**30)


@dataclass(frozen=True)
class Turns:
    """p_0 .. p_l, h_1 .. h_l, and the distribution after 0 .. l kept drafts.

    They belong to one draft and verify length l.
    """

    standing: tuple[Fraction, ...]
    kept: tuple[Fraction, ...]
    behind: tuple[tuple[Fraction, ...], ...]


def turns(target: Chain, drafter: Chain, draft: Prefix, length: int) -> Turns:
    """By the definition, in rationals."""
    standing, kept = [Fraction(1)], []
    behind: list[tuple[Fraction, ...]] = []
    for i in range(length + 1):
        wanted, proposed = target(draft[:i]), drafter(draft[:i])
        p = standing[-1]
        left = [max(p * t - d, Fraction(0)) for t, d in zip(wanted, proposed, strict=True)]
        total = sum(left, Fraction(0))
        last = i == length
        if i:
            rest = total + 1 - p
            kept.append(p if last else total / rest if rest else Fraction(1))
        behind.append(wanted if last or not total else tuple(x / total for x in left))
        if not last:
            t, d = wanted[draft[i]], proposed[draft[i]]
            standing.append(min(Fraction(1), p * t / d))
    return Turns(tuple(standing), tuple(kept), tuple(behind))


def split(places: set[Fraction], fence: Fraction = FENCE) -> list[tuple[float, Fraction]]:
    """Cells of [0, 1) between the places: a point inside of each, and its width."""
    inner = {p for p in places if 0 < p < 1}
    edges = sorted(
        {Fraction(0), Fraction(1)} | inner | {p + s * fence for p in inner for s in (-1, 1)}
    )
    edges = [e for e in edges if 0 <= e <= 1]
    return [(float((a + b) / 2), b - a) for a, b in itertools.pairwise(edges)]


def cells(
    target: Chain, drafter: Chain, draft: Prefix, length: int
) -> tuple[Tensor, list[Fraction]]:
    """Uniforms of a step, [N, gamma + 1] float64, the bonus's last, and the chance of each."""
    found = turns(target, drafter, draft, length)
    axes = [split({h}) for h in found.kept]
    axes += [[(0.5, Fraction(1))]] * (len(draft) - length)
    axes.append(split({e for row in found.behind for e in itertools.accumulate(row)}))
    grid = list(itertools.product(*axes))
    points = torch.tensor([[u for u, _ in cell] for cell in grid], dtype=torch.float64)
    return points, [prod((w for _, w in cell), start=Fraction(1)) for cell in grid]


def distribution_given_draft(
    rule: AcceptRule, target: Chain, drafter: Chain, draft: Prefix, length: int
) -> dict[Prefix, Fraction]:
    """Return the exact distribution of one step's output, its draft and verify length given."""
    points, chances = cells(target, drafter, draft, length)
    count, gamma = len(points), len(draft)
    tokens = torch.tensor(draft).expand(count, gamma)
    wanted = probabilities(target, draft, gamma + 1).double()
    wanted[length + 1 :] = float("nan")  # never computed in a ragged pass
    proposed = probabilities(drafter, draft, gamma).double()
    proposed[length:] = float("nan")
    outcome = rule(
        tokens,
        proposed.expand(count, -1, -1),
        wanted.expand(count, -1, -1),
        points[:, :gamma],
        points[:, gamma],
        torch.full((count,), length),
    )
    return emitted_by_cell(outcome, tokens, chances)


class Steps:
    """One step under any choice of the verify length, then plain decoding: gamma + 1 tokens."""

    def __init__(self, rule: AcceptRule, target: Chain, drafter: Chain, gamma: int):
        self.target, self.drafter, self.gamma = target, drafter, gamma
        self.drafted = {
            draft: mass for draft, mass in joint_distribution(drafter, gamma).items() if mass
        }
        self.emitted = {
            (draft, length): distribution_given_draft(rule, target, drafter, draft, length)
            for draft in self.drafted
            for length in range(gamma + 1)
        }
        self.completed = {
            key: complete(distribution, target, gamma + 1)
            for key, distribution in self.emitted.items()
        }
        self.plain = joint_distribution(target, gamma + 1)

    def distribution(self, lengths: dict[Prefix, int]) -> dict[Prefix, Fraction]:
        """Return the distribution of gamma + 1 tokens; lengths: of each draft."""
        distribution = dict.fromkeys(self.plain, Fraction(0))
        for draft, mass in self.drafted.items():
            for text, share in self.completed[draft, lengths[draft]].items():
                distribution[text] += mass * share
        return distribution

    def kept(self, lengths: dict[Prefix, int]) -> Fraction:
        """E[tau], drafts kept by a step."""
        return sum(
            (
                mass * share * (len(text) - 1)
                for draft, mass in self.drafted.items()
                for text, share in self.emitted[draft, lengths[draft]].items()
            ),
            Fraction(0),
        )

    def kept_token_by_token(self, lengths: dict[Prefix, int]) -> Fraction:
        """E[tau] of the rule that judges each draft by itself."""
        total = Fraction(0)
        for draft, mass in self.drafted.items():
            alive = Fraction(1)
            for i in range(lengths[draft]):
                t, d = self.target(draft[:i])[draft[i]], self.drafter(draft[:i])[draft[i]]
                alive *= min(Fraction(1), t / d)
                total += mass * alive
        return total
