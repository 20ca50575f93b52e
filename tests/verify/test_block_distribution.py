"""Test the block rule by exact enumeration of every window that does not look ahead.

Each has the target's distribution and keeps at least as many drafts as token by token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import pytest
import torch

from sglang_dspark.verify import Acceptance, accept_block, accept_sampled
from sglang_dspark.verify.block import standing
from tests.verify.block_cells import Steps, turns
from tests.verify.chains import Chain, Prefix, emitted_distribution, probabilities, quarters
from tests.verify.test_exact_distribution import DRAFTER, TARGET, is_lossless

WEIGHTS = 16  # probabilities are sixteenths, which float32 holds


def random_chain(seed: int, vocab: int) -> Chain:
    """Draw a distribution for each prefix, with some impossible tokens."""

    @cache
    def distribution(prefix: Prefix) -> tuple[Fraction, ...]:
        cuts = sorted(random.Random(f"{seed} {prefix}").choices(range(WEIGHTS + 1), k=vocab - 1))
        edges = [0, *cuts, WEIGHTS]
        return tuple(Fraction(b - a, WEIGHTS) for a, b in itertools.pairwise(edges))

    return distribution


def near(chain: Chain, other: Chain) -> Chain:
    """Half of each: where the drafter is good, drafts make up for one another."""
    return lambda prefix: tuple(
        (a + b) / 2 for a, b in zip(chain(prefix), other(prefix), strict=True)
    )


def stopping_times(vocab: int, gamma: int) -> Iterator[dict[Prefix, int]]:
    """All choices of the verify length that look at no draft outside the window, by draft."""
    if gamma == 0:
        yield {(): 0}
        return
    drafts = list(itertools.product(range(vocab), repeat=gamma))
    yield dict.fromkeys(drafts, 0)
    for each in itertools.product(list(stopping_times(vocab, gamma - 1)), repeat=vocab):
        yield {draft: 1 + each[draft[0]][draft[1:]] for draft in drafts}


SMALL = (
    quarters({0: (3, 1), 1: (1, 3)}, default=(2, 2)),
    quarters({0: (1, 3), 1: (2, 2)}, default=(3, 1)),
)


def world(name: str) -> tuple[Chain, Chain]:
    if name == "small":
        return SMALL
    if name == "three tokens":
        return TARGET, DRAFTER
    kind, seed, vocab = name.split()
    target, other = random_chain(int(seed), int(vocab)), random_chain(100 + int(seed), int(vocab))
    return target, near(target, other) if kind == "near" else other


@cache
def steps(name: str, gamma: int) -> Steps:
    return Steps(accept_block, *world(name), gamma)


# 677 stopping times of four drafts over two tokens, 730 of three over three tokens, 17 of two over
# four tokens, where several are left to draw from behind drafts that make up for one another
WORLDS = [
    ("small", 2, 4),
    ("far 1 2", 2, 4),
    ("near 2 2", 2, 4),
    ("three tokens", 3, 3),
    ("far 3 3", 3, 3),
    ("near 4 3", 3, 2),
    ("far 2 4", 4, 2),
    ("near 0 4", 4, 2),
]


@pytest.mark.parametrize(("name", "vocab", "gamma"), WORLDS)
def test_every_window_that_does_not_look_ahead_keeps_the_distribution(
    name: str, vocab: int, gamma: int
) -> None:
    found = steps(name, gamma)
    more = 0
    for lengths in stopping_times(vocab, gamma):
        assert found.distribution(lengths) == found.plain
        kept, token_by_token = found.kept(lengths), found.kept_token_by_token(lengths)
        assert kept >= token_by_token
        more += kept > token_by_token
    assert more > 0, "the case must have drafts that make up for one another"


@pytest.mark.parametrize(("name", "vocab", "gamma"), [("small", 2, 2), ("near 2 2", 2, 3)])
def test_a_window_that_looks_ahead_changes_the_distribution(
    name: str, vocab: int, gamma: int
) -> None:
    """Of x_1 = 0 the window is empty: it has looked at a draft that is not in it."""
    found = steps(name, gamma)
    lengths = {draft: 0 if draft[0] == 0 else gamma for draft in found.drafted}
    assert found.distribution(lengths) != found.plain


@pytest.mark.parametrize(("name", "vocab", "gamma"), WORLDS)
def test_a_draft_stands_with_its_chance_at_every_longer_window(
    name: str, vocab: int, gamma: int
) -> None:
    """P(tau >= i | x_1 .. x_i) = p_i for each l >= i, not only for l = i."""
    found = steps(name, gamma)
    for length in range(1, gamma + 1):
        seen: dict[Prefix, Fraction] = {}
        mass_of: dict[Prefix, Fraction] = {}
        for draft, mass in found.drafted.items():
            for i in range(1, length + 1):
                kept = sum(
                    share for text, share in found.emitted[draft, length].items() if len(text) > i
                )
                seen[draft[:i]] = seen.get(draft[:i], Fraction(0)) + mass * kept
                mass_of[draft[:i]] = mass_of.get(draft[:i], Fraction(0)) + mass
        for prefix, kept_mass in seen.items():
            chance = turns(found.target, found.drafter, prefix, len(prefix)).standing[-1]
            assert kept_mass == mass_of[prefix] * chance


def test_standing_is_the_definition() -> None:
    target, drafter = world("far 3 3")
    for draft in steps("far 3 3", 3).drafted:
        found = standing(
            torch.tensor([draft]),
            probabilities(drafter, draft, 3)[None],
            probabilities(target, draft, 4)[None],
        )[0]
        assert found.tolist() == pytest.approx(
            [float(p) for p in turns(target, drafter, draft, 3).standing], abs=1e-15
        )


def test_one_draft_is_judged_as_token_by_token() -> None:
    found = steps("three tokens", 3)
    for length in (0, 1):
        lengths = dict.fromkeys(found.drafted, length)
        assert found.kept(lengths) == found.kept_token_by_token(lengths)


@pytest.mark.parametrize(("gamma", "verify_len"), [(1, 1), (2, 1), (2, 2)])
def test_argmax_drafts(gamma: int, verify_len: int) -> None:
    distribution = emitted_distribution(
        accept_block, TARGET, DRAFTER, gamma, verify_len, argmax=True
    )
    assert is_lossless(distribution, gamma)


def test_perfect_drafter_is_always_accepted() -> None:
    found = Steps(accept_block, TARGET, TARGET, 2)
    lengths = dict.fromkeys(found.drafted, 2)
    assert found.kept(lengths) == 2
    assert found.distribution(lengths) == found.plain


def test_the_token_wise_rule_has_other_turns() -> None:
    """The cells are those of the block rule; the harness distinguishes it from the other."""
    found = Steps(accept_sampled, *SMALL, 3)
    assert found.distribution(dict.fromkeys(found.drafted, 3)) != found.plain


def _batch(seed: int, rows: int, gamma: int, vocab: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    proposal = torch.softmax(torch.randn(rows, gamma, vocab, generator=generator), -1)
    shift = torch.randn(rows, gamma + 1, vocab, generator=generator)
    target = torch.softmax(torch.cat([proposal, proposal[:, :1]], 1).log() + 0.5 * shift, -1)
    draft = torch.multinomial(proposal.flatten(0, 1), 1, generator=generator).view(rows, gamma)
    lens = torch.randint(0, gamma + 1, (rows,), generator=generator)
    uniforms = torch.rand(rows, gamma + 1, generator=generator, dtype=torch.float64)
    return draft, proposal, target, uniforms[:, :gamma], uniforms[:, gamma], lens


def test_unchecked_is_the_same_and_reads_no_unverified_row() -> None:
    given = _batch(1, 200, 5, 40)
    _, proposal, target, _, _, lens = given
    wanted = accept_block(*given)
    behind = torch.arange(6)[None, :] > lens[:, None]
    target[behind] = float("nan")
    proposal[behind[:, 1:]] = float("nan")
    for checked in (True, False):
        found = accept_block(*given, checked=checked)
        assert torch.equal(found.accepted, wanted.accepted)
        assert torch.equal(found.bonus, wanted.bonus)
    assert set(wanted.accepted.tolist()) == set(range(6))
    assert isinstance(wanted, Acceptance)


def test_rows_of_a_batch_do_not_mix() -> None:
    given = _batch(2, 60, 4, 20)
    both = accept_block(*given)
    for r in range(60):
        alone = accept_block(*(part[r : r + 1] for part in given))
        assert int(alone.accepted) == int(both.accepted[r])
        assert int(alone.bonus) == int(both.bonus[r])


def test_distributions_equal_up_to_rounding_keep_what_the_last_draft_does_not() -> None:
    """Nothing is left behind draft 1 and nothing was lost: it is kept though draft 2 is not."""
    proposal = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    target = torch.tensor([[[0.5, 0.5], [0.5 - 2**-20, 0.5], [0.0, 1.0]]])
    outcome = accept_block(
        torch.tensor([[1, 0]]),
        proposal,
        target,
        torch.tensor([[1 - 2**-24, 1 - 2**-24]]),
        torch.tensor([0.75]),
    )
    assert outcome.accepted.tolist() == [1]
    assert outcome.bonus.tolist() == [1]


@pytest.mark.parametrize("proposed", [0.5, 0.0])  # 0: its own chance was rounded away
def test_a_draft_without_target_mass_is_never_kept(proposed: float) -> None:
    proposal = torch.tensor([[[proposed, 1 - proposed], [0.5, 0.5]]])
    target = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]])
    zero = torch.zeros(1, 2)
    outcome = accept_block(torch.tensor([[0, 0]]), proposal, target, zero, zero[0, :1])
    assert (outcome.accepted.tolist(), outcome.bonus.tolist()) == ([0], [1])


def test_shapes_and_lengths_are_checked() -> None:
    draft, proposal, target, accept, bonus, _ = _batch(3, 2, 3, 5)
    with pytest.raises(ValueError, match="target_probs"):
        accept_block(draft, proposal, target[:, :3], accept, bonus)
    with pytest.raises(ValueError, match=r"0\.\.3"):
        accept_block(draft, proposal, target, accept, bonus, torch.tensor([4, 0]))
