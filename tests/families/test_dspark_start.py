"""Check that a sequential head of every kind begins at the bigrams of the answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_dspark.drafter.heads import HEADS, MarkovHead
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.families.dspark.initial import OPEN, _start_markov
from tests.drafter.helpers import tiny_config

ALLOWED = torch.tensor([3, 5, 8, 13])


def begun(kind: str, ids: Tensor | None) -> MarkovHead:
    """The head of a drafter that begins with pairs of a few tokens."""
    drafter = DSparkDrafter(tiny_config(markov_head_type=kind))
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randint(0, 16, (2, 400), generator=generator)
    torch.manual_seed(0)  # the factors are found at random
    with torch.no_grad():
        _start_markov(drafter, pairs, ids)
    return drafter.markov_head


@pytest.mark.parametrize("ids", [None, ALLOWED], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("kind", HEADS)
def test_every_head_begins_as_the_plain_one(kind: str, ids: Tensor | None) -> None:
    plain, head = begun("vanilla", ids), begun(kind, ids)
    tokens = torch.arange(16)
    embedded = plain.embed(tokens)
    assert torch.equal(head.embed(tokens), embedded)
    assert float(embedded.detach().abs().max()) > 0.1, "the bigrams must say something"
    expected = {
        "vanilla": embedded,
        "gated": embedded * torch.sigmoid(torch.tensor(OPEN)),
        "rnn": torch.tanh(embedded),
    }[kind]
    if ids is not None:  # the last rank says which tokens are allowed, through any head
        expected = torch.cat((expected[:, :-1], torch.ones(16, 1)), -1)
    h = torch.randn(16, head_width(head))
    state = head.start(16)
    for _ in range(3):  # at every position of a block
        latent, state = head.latent(embedded, h, state)
        torch.testing.assert_close(latent, expected)


def head_width(head: MarkovHead) -> int:
    """Width of the hidden states that a gate or a recurrence reads."""
    rank = head.markov_w1.weight.shape[1]
    if hasattr(head, "gate_proj"):
        return int(head.gate_proj.in_features) - rank
    return int(head.joint_proj.in_features) - 2 * rank if hasattr(head, "joint_proj") else 1
