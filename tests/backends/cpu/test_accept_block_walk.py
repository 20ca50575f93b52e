"""The compiled walk of the block rule is the reference's."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.backends.cpu import accept
from sglang_dspark.verify import accept_block, block


def batch(vocab: int, gamma: int, spread: float) -> tuple[torch.Tensor, ...]:
    """Build drafts, both distributions, uniforms and window lengths of 300 requests."""
    rows, generator = 300, torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, gamma, vocab, generator=generator)
    shift = torch.randn(rows, gamma + 1, vocab, generator=generator) * spread
    target = torch.softmax(torch.cat([logits, logits[:, :1]], 1) + shift, -1)
    target = torch.where(target >= target.topk(vocab // 2).values[..., -1:], target, 0.0)
    target /= target.sum(-1, keepdim=True)
    proposal = logits.softmax(-1)
    draft = torch.multinomial(proposal.flatten(0, 1), 1, generator=generator).view(rows, gamma)
    lens = torch.randint(0, gamma + 1, (rows,), generator=generator)
    behind = torch.arange(gamma + 1)[None, :] > lens[:, None]
    target[behind], proposal[behind[:, 1:]] = float("nan"), float("nan")
    uniforms = torch.rand(rows, gamma, generator=generator, dtype=torch.float64)
    return draft, proposal, target, uniforms, lens


@pytest.mark.parametrize(("vocab", "gamma"), [(4, 1), (7, 3), (1000, 5), (33, 7)])
@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_compiled_walk_is_the_references(vocab: int, gamma: int, spread: float) -> None:
    given = batch(vocab, gamma, spread)
    wanted, chance = block.walk(*given)
    found, found_chance = accept.walk(*given)
    assert found.equal(wanted)
    torch.testing.assert_close(found_chance, chance, rtol=1e-12, atol=1e-15)
    assert set(wanted.tolist()) == set(range(gamma + 1))


def test_equal_distributions_keep_every_draft() -> None:
    _, proposal, _, uniforms, _ = batch(9, 4, 0.0)
    lens = torch.full((300,), 4)
    proposal = proposal.nan_to_num(1 / 9)
    target = torch.cat([proposal, proposal[:, :1]], 1)
    draft = proposal.argmax(-1)
    given = draft, proposal, target, uniforms
    found = accept_block(*given, torch.zeros(300), lens, walked=accept.walk)
    assert found.accepted.equal(lens)
