"""Chi-square against the target's chain with real random numbers, and mutants it must reject."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_dspark.verify import (
    BatchSampling,
    accept_sampled,
    sample_inverse_cdf,
    target_distribution,
)
from tests.verify import mutants
from tests.verify.chains import AcceptRule

VOCAB = 6
GAMMA = 2
STEPS = 60_000
# One false alarm in a million runs; the mutants land below 1e-30.
ALARM = 1e-6


def _logits(seed: int) -> Tensor:
    """[V + 1, V] logits behind each last token; row V is the start."""
    return torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.2


def _target_table(sampling: BatchSampling) -> Tensor:
    return target_distribution(_logits(3)[None], sampling)[0].double()  # [V + 1, V]


def _p_value(counts: Tensor, expected: Tensor) -> float:
    """Pearson chi-square of counts [n] against expected counts [n]; impossible cells must be 0."""
    possible = expected > 1e-9
    if int(counts[~possible].sum()):
        return 0.0
    counts, expected = counts[possible].double(), expected[possible]
    assert float(expected.min()) >= 5, "cells too thin for chi-square"
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def first_two_tokens(
    rule: AcceptRule, target: Tensor, *, argmax: bool, claim_sampled: bool, seed: int
) -> Tensor:
    """Counts [V, V] of the first two tokens over `STEPS` verify steps, completed by the target."""
    generator = torch.Generator().manual_seed(seed)
    drafter = torch.softmax(_logits(5), dim=1).double()
    last = torch.full((STEPS,), VOCAB)
    draft, draft_probs = [], []
    for _ in range(GAMMA):
        distribution = drafter[last]
        uniforms = torch.rand(STEPS, generator=generator)
        last = distribution.argmax(1) if argmax else sample_inverse_cdf(distribution, uniforms)
        draft.append(last)
        draft_probs.append(distribution)
    tokens = torch.stack(draft, dim=1)  # [S, gamma]
    before = torch.cat([torch.full((STEPS, 1), VOCAB), tokens], dim=1)  # [S, gamma + 1]
    verify_lens = torch.randint(0, GAMMA + 1, (STEPS,), generator=generator)
    outcome = rule(
        tokens,
        None if argmax and not claim_sampled else torch.stack(draft_probs, dim=1),
        target[before],
        torch.rand(STEPS, GAMMA, generator=generator),
        torch.rand(STEPS, generator=generator),
        verify_lens,
    )
    text = outcome.tokens(tokens)
    follow = sample_inverse_cdf(target[text[:, 0]], torch.rand(STEPS, generator=generator))
    second = torch.where(outcome.emitted >= 2, text[:, 1], follow)
    return torch.bincount(text[:, 0] * VOCAB + second, minlength=VOCAB**2)


def p_value(
    rule: AcceptRule, sampling: BatchSampling, *, argmax: bool = False, claim_sampled: bool = False
) -> float:
    target = _target_table(sampling)
    counts = first_two_tokens(rule, target, argmax=argmax, claim_sampled=claim_sampled, seed=11)
    expected = (target[VOCAB][:, None] * target[:VOCAB]).reshape(-1) * STEPS
    return _p_value(counts, expected)


SETTINGS = {
    "temperature": BatchSampling.uniform(1, 0.8),
    "top_k": BatchSampling.uniform(1, 1.0, top_k=3),
    "top_p": BatchSampling.uniform(1, 1.2, top_p=0.8),
    "min_p": BatchSampling.uniform(1, 1.0, min_p=0.2),
}


@pytest.mark.parametrize("setting", sorted(SETTINGS))
@pytest.mark.parametrize("argmax", [False, True])
def test_distribution_is_the_targets(setting: str, argmax: bool) -> None:
    assert p_value(accept_sampled, SETTINGS[setting], argmax=argmax) > ALARM


@pytest.mark.parametrize("setting", sorted(SETTINGS))
@pytest.mark.parametrize(
    "mutant",
    [mutants.residual_skipped, mutants.bonus_off_by_one, mutants.window_end_as_rejection],
)
def test_mutants_are_caught(setting: str, mutant: AcceptRule) -> None:
    assert p_value(mutant, SETTINGS[setting]) < ALARM


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_argmax_draft_taken_for_sampled_is_caught(setting: str) -> None:
    alarm = p_value(accept_sampled, SETTINGS[setting], argmax=True, claim_sampled=True)
    assert alarm < ALARM
