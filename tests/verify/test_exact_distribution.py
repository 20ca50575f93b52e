"""Enumerate one verify step followed by plain decoding: plain decoding's exact distribution."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from sglang_dspark.verify import (
    Acceptance,
    BatchSampling,
    accept_greedy,
    accept_sampled,
    target_distribution,
)
from tests.verify import mutants
from tests.verify.chains import (
    Chain,
    Prefix,
    complete,
    emitted_distribution,
    joint_distribution,
    quarters,
)

TARGET = quarters({0: (2, 1, 1), 1: (0, 3, 1), 2: (1, 1, 2)}, default=(1, 2, 1))
DRAFTER = quarters({0: (1, 2, 1), 1: (3, 0, 1), 2: (2, 2, 0)}, default=(2, 1, 1))
# gamma 3 has 20,736 cells for each of its drafts; the lengths in between are covered by gamma 2.
WINDOWS = [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]


def is_lossless(distribution: dict[Prefix, Fraction], gamma: int) -> bool:
    length = gamma + 1
    assert sum(distribution.values()) == 1
    return complete(distribution, TARGET, length) == joint_distribution(TARGET, length)


@pytest.mark.parametrize(("gamma", "verify_len"), WINDOWS)
@pytest.mark.parametrize("argmax", [False, True])
def test_joint_distribution_is_the_targets(gamma: int, verify_len: int, argmax: bool) -> None:
    distribution = emitted_distribution(
        accept_sampled, TARGET, DRAFTER, gamma, verify_len, argmax=argmax
    )
    assert is_lossless(distribution, gamma)
    # Drafts were really exercised: strings longer than one token come out.
    assert (max(map(len, distribution)) > 1) == (verify_len > 0)


@pytest.mark.parametrize(("gamma", "verify_len"), [(2, 1), (2, 2), (3, 3)])
def test_acceptance_probability_is_the_overlap(gamma: int, verify_len: int) -> None:
    """P(first draft accepted) = sum_x min(p_t, p_d), the optimum of any coupling."""
    distribution = emitted_distribution(accept_sampled, TARGET, DRAFTER, gamma, verify_len)
    overlap = sum(map(min, TARGET(()), DRAFTER(())))
    assert sum(mass for text, mass in distribution.items() if len(text) > 1) == overlap


def test_perfect_drafter_is_always_accepted() -> None:
    distribution = emitted_distribution(accept_sampled, TARGET, TARGET, 2, 2)
    assert {len(text) for text in distribution} == {3}
    assert is_lossless(distribution, 2)


@pytest.mark.parametrize("mutant", [mutants.residual_skipped, mutants.bonus_off_by_one])
@pytest.mark.parametrize(("gamma", "verify_len"), [(1, 1), (2, 1), (2, 2)])
def test_mutants_are_caught(mutant: object, gamma: int, verify_len: int) -> None:
    distribution = emitted_distribution(mutant, TARGET, DRAFTER, gamma, verify_len)  # type: ignore[arg-type]
    assert not is_lossless(distribution, gamma)


@pytest.mark.parametrize("verify_len", [0, 1])
def test_window_end_mutant_is_caught(verify_len: int) -> None:
    distribution = emitted_distribution(
        mutants.window_end_as_rejection, TARGET, DRAFTER, 2, verify_len
    )
    assert not is_lossless(distribution, 2)


@pytest.mark.parametrize(("gamma", "verify_len"), [(1, 1), (2, 1), (2, 2)])
def test_argmax_draft_taken_for_sampled_is_caught(gamma: int, verify_len: int) -> None:
    distribution = emitted_distribution(
        accept_sampled, TARGET, DRAFTER, gamma, verify_len, argmax=True, claim_sampled=True
    )
    assert not is_lossless(distribution, gamma)


def test_greedy_rule_emits_the_greedy_chain() -> None:
    """T = 0: for any drafts, the emitted string is a prefix of greedy decoding."""
    greedy: Prefix = ()
    for _ in range(4):
        distribution = TARGET(greedy)
        greedy = (*greedy, distribution.index(max(distribution)))
    for draft in joint_distribution(DRAFTER, 3):
        rows = [TARGET(draft[:k]) for k in range(4)]
        argmax = torch.tensor([[row.index(max(row)) for row in rows]])
        for verify_len in range(4):
            tokens = torch.tensor([draft])
            outcome = accept_greedy(tokens, argmax, torch.tensor([verify_len]))
            count = int(outcome.emitted[0])
            assert tuple(outcome.tokens(tokens)[0, :count].tolist()) == greedy[:count]
            assert count == 1 + min(verify_len, _common_prefix(draft, greedy))


def _common_prefix(a: Prefix, b: Prefix) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


# Logits -> truncated distribution -> accept rule. Weights are eighths; every cut leaves quarters.
EIGHTHS = quarters({0: (3, 3, 1, 1), 1: (6, 2, 0, 0), 2: (2, 2, 2, 2)}, default=(3, 3, 1, 1))
CUTS = {
    "top_k": (BatchSampling.uniform(1, 1.0, top_k=2), (2, None, None)),
    "top_p": (BatchSampling.uniform(1, 1.0, top_p=0.45), (None, Fraction(45, 100), None)),
    # Renormalising between top-k and top-p would drop the second token of (3, 3, 1, 1).
    "joint": (BatchSampling.uniform(1, 1.0, top_k=2, top_p=0.4), (2, Fraction(4, 10), None)),
    "min_p": (BatchSampling.uniform(1, 1.0, min_p=0.6), (None, None, Fraction(6, 10))),
}


def _cut_chain(top_k: int | None, top_p: Fraction | None, min_p: Fraction | None) -> Chain:
    """Rational truncation by hand: ties go to the lowest id."""

    def distribution(prefix: Prefix) -> tuple[Fraction, ...]:
        base = EIGHTHS(prefix)
        order = sorted(range(len(base)), key=lambda i: (-base[i], i))
        before = Fraction(0)
        kept = set()
        for rank, token in enumerate(order):
            inside_k = top_k is None or rank < top_k
            inside_p = top_p is None or before <= top_p
            inside_min = min_p is None or base[token] >= min_p * base[order[0]]
            if inside_k and inside_p and inside_min:
                kept.add(token)
            before += base[token]
        total = sum(base[i] for i in kept)
        return tuple(base[i] / total if i in kept else Fraction(0) for i in range(len(base)))

    return distribution


@pytest.mark.parametrize("name", sorted(CUTS))
@pytest.mark.parametrize("argmax", [False, True])
def test_truncated_distribution_is_exact(name: str, argmax: bool) -> None:
    """The rule fed by `target_distribution` reproduces the truncated chain, drafts untruncated."""
    sampling, cut = CUTS[name]
    target = _cut_chain(*cut)
    drafter = quarters({0: (0, 2, 1, 1), 2: (1, 1, 1, 1)}, default=(1, 1, 2, 0))

    def rule(tokens, draft_probs, target_probs, *rest):  # type: ignore[no-untyped-def]
        # One draft a call: rebuild the pass's logits from it and truncate them for real.
        draft = tuple(tokens[0].tolist())
        rows = [[float(p) for p in EIGHTHS(draft[:k])] for k in range(3)]
        probs = target_distribution(torch.tensor([rows]).log(), sampling)
        assert torch.allclose(probs[0], target_probs[0], atol=1e-6)
        return accept_sampled(tokens, draft_probs, probs.expand(len(tokens), -1, -1), *rest)

    distribution = emitted_distribution(rule, target, drafter, 2, 2, argmax=argmax)
    assert complete(distribution, target, 3) == joint_distribution(target, 3)


def test_rows_of_a_batch_do_not_mix() -> None:
    """Two requests with different windows in one batch get what each gets alone."""
    draft = torch.tensor([[0, 1], [2, 2]])
    target_probs = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0))
    target_probs /= target_probs.sum(-1, keepdim=True)
    draft_probs = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(1))
    draft_probs /= draft_probs.sum(-1, keepdim=True)
    lens = torch.tensor([1, 2])
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        accept_u, bonus_u = (
            torch.rand(2, 2, generator=generator),
            torch.rand(2, generator=generator),
        )
        both = accept_sampled(draft, draft_probs, target_probs, accept_u, bonus_u, lens)
        for r in range(2):
            one = slice(r, r + 1)
            alone: Acceptance = accept_sampled(
                draft[one],
                draft_probs[one],
                target_probs[one],
                accept_u[one],
                bonus_u[one],
                lens[one],
            )
            assert both.accepted[r] == alone.accepted[0]
            assert both.bonus[r] == alone.bonus[0]
