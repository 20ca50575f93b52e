"""Build small chains with exact rational probabilities, and the distribution of emitted tokens.

The accept rule is run for every draft and every cell of a grid of uniforms. All breakpoints of the
rule are on that grid, so counting cells gives the exact distribution of the real implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from sglang_dspark.verify import Acceptance

Prefix = tuple[int, ...]
Chain = Callable[[Prefix], tuple[Fraction, ...]]
AcceptRule = Callable[..., Acceptance]
# Ratios and residual shares of probabilities in quarters have denominators 1, 2, 3 and 4.
GRID = 12


def quarters(table: Mapping[int, tuple[int, ...]], default: tuple[int, ...]) -> Chain:
    """Build a chain whose next token depends on the last token and the length of the prefix."""

    def distribution(prefix: Prefix) -> tuple[Fraction, ...]:
        weights = table.get(prefix[-1], default) if prefix else default
        turn = len(prefix) % len(weights)
        rotated = weights[turn:] + weights[:turn]
        return tuple(Fraction(w, sum(weights)) for w in rotated)

    return distribution


def joint_distribution(chain: Chain, length: int) -> dict[Prefix, Fraction]:
    """P(first `length` tokens) by plain decoding."""
    distribution: dict[Prefix, Fraction] = {(): Fraction(1)}
    for _ in range(length):
        distribution = {
            (*prefix, token): mass * share
            for prefix, mass in distribution.items()
            for token, share in enumerate(chain(prefix))
        }
    return distribution


def complete(
    emitted: Mapping[Prefix, Fraction], chain: Chain, length: int
) -> dict[Prefix, Fraction]:
    """Return the distribution of `length` tokens; plain decoding continues each string."""
    distribution: dict[Prefix, Fraction] = dict.fromkeys(
        joint_distribution(chain, length), Fraction(0)
    )
    for text, mass in emitted.items():
        tail = {text: mass}
        while len(next(iter(tail))) < length:
            tail = {
                (*prefix, token): weight * share
                for prefix, weight in tail.items()
                for token, share in enumerate(chain(prefix))
            }
        for full, weight in tail.items():
            distribution[full[:length]] += weight
    return distribution


def probabilities(chain: Chain, draft: Prefix, rows: int) -> Tensor:
    """[rows, V] float32: the chain's distribution after the first 0, 1, ... drafts."""
    return torch.tensor([[float(p) for p in chain(draft[:k])] for k in range(rows)])


def grid_uniforms(gamma: int) -> tuple[Tensor, Tensor]:
    """Midpoints of all cells: accept uniforms [N, gamma], bonus uniforms [N]."""
    midpoints = [(2 * i + 1) / (2 * GRID) for i in range(GRID)]
    cells = torch.tensor(list(itertools.product(midpoints, repeat=gamma + 1)), dtype=torch.float64)
    return cells[:, :gamma], cells[:, gamma]


def draft_distribution(chain: Chain, gamma: int, argmax: bool) -> dict[Prefix, Fraction]:
    """P(draft), sampled from the chain or always its argmax (lowest id on ties)."""
    if not argmax:
        return {draft: mass for draft, mass in joint_distribution(chain, gamma).items() if mass}
    draft: Prefix = ()
    for _ in range(gamma):
        distribution = chain(draft)
        draft = (*draft, distribution.index(max(distribution)))
    return {draft: Fraction(1)}


def emitted_by_cell(
    outcome: Acceptance, tokens: Tensor, chances: Sequence[Fraction]
) -> dict[Prefix, Fraction]:
    """Return the exact distribution of the output of cells with these chances.

    tokens: drafts [N, gamma].
    """
    distribution: dict[Prefix, Fraction] = {}
    emitted = outcome.tokens(tokens).tolist()
    for text, size, chance in zip(emitted, outcome.emitted.tolist(), chances, strict=True):
        key = tuple(text[:size])
        distribution[key] = distribution.get(key, Fraction(0)) + chance
    return distribution


def emitted_distribution(
    rule: AcceptRule,
    target: Chain,
    drafter: Chain,
    gamma: int,
    verify_len: int,
    *,
    argmax: bool = False,
    claim_sampled: bool = False,
) -> dict[Prefix, Fraction]:
    """Return the exact distribution of the strings that one step of `rule` emits.

    argmax drafts are passed as such (draft_probs None) unless `claim_sampled`, a mistake that
    the tests must notice.
    """
    accept_u, bonus_u = grid_uniforms(gamma)
    cells = len(bonus_u)
    distribution: dict[Prefix, Fraction] = {}
    for draft, mass in draft_distribution(drafter, gamma, argmax).items():
        tokens = torch.tensor(draft).expand(cells, gamma)
        target_probs = probabilities(target, draft, gamma + 1)
        target_probs[verify_len + 1 :] = float("nan")  # never computed in a ragged pass
        draft_probs = probabilities(drafter, draft, gamma).expand(cells, -1, -1)
        outcome = rule(
            tokens,
            None if argmax and not claim_sampled else draft_probs,
            target_probs.expand(cells, -1, -1),
            accept_u,
            bonus_u,
            torch.full((cells,), verify_len),
        )
        emitted = outcome.tokens(tokens).tolist()
        for text, count in zip(emitted, outcome.emitted.tolist(), strict=True):
            key = tuple(text[:count])
            distribution[key] = distribution.get(key, Fraction(0)) + mass / cells
    return distribution
