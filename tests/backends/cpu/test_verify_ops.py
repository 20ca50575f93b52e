"""Sampling-verify operators: the bookkeeping exactly, the probs of the tokens by frequency."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import accept
from sglang_dspark.verify import accept_sampled
from tests.backends.cpu.draft_world import settings

VOCAB = 5


def random_probs(rows: int, width: int) -> Tensor:
    return torch.softmax(torch.randn(rows, width, VOCAB) * 1.5, dim=-1)


def chain_buffers(rows: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """predicts, accept_index, accept_token_num, retrive_index, next_token, next_sibling."""
    links = torch.arange(1, n + 1)
    links[-1] = -1
    return (
        torch.full((rows * n,), -7, dtype=torch.int32),
        torch.full((rows, n), -1, dtype=torch.int32),
        torch.empty(rows, dtype=torch.int32),
        torch.arange(rows * n).view(rows, n),
        links.expand(rows, n).clone(),
        torch.full((rows, n), -1),
    )


def verified(
    rows: int, n: int, target: Tensor, candidates: Tensor, draft_probs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """EAGLE's chains [rows, n] with --speculative-use-rejection-sampling."""
    flat = chain_buffers(rows, n)[3]
    verify_input = SimpleNamespace(
        draft_token_num=n,
        draft_token=candidates.flatten(),
        retrieve_index=flat,
        draft_probs=draft_probs,
    )
    info = settings(torch.ones(rows))
    return accept.sample_windows(verify_input, info, target.log().flatten(0, 1))


@pytest.fixture(params=[True, False], ids=["rejection", "target only"])
def rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(speculative_use_rejection_sampling=request.param)
    monkeypatch.setitem(vars(accept.upstream), "get_spec", lambda: spec)


@pytest.mark.usefixtures("rule")
@pytest.mark.parametrize("rule", [True], indirect=True)
def test_chain_writes_what_the_accept_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows, gamma = 64, 4
    n = gamma + 1
    candidates = torch.randint(0, VOCAB, (rows, n))
    outcomes = []

    def recorded(*given: Tensor) -> Any:
        outcomes.append(accept_sampled(*given))
        return outcomes[-1]

    monkeypatch.setattr(accept, "accept_sampled", recorded)
    predicts, gained, index = verified(
        rows, n, random_probs(rows, n), candidates, random_probs(rows, gamma)
    )
    (want,) = outcomes
    count = gained - 1
    assert count.tolist() == want.accepted.tolist()
    assert len(set(count.tolist())) > 2, "the case must exercise several lengths"
    emitted = want.tokens(candidates[:, 1:])
    for r in range(rows):
        accepted = int(count[r])
        nodes = [r * n + i for i in range(accepted + 1)]
        assert index[r, : accepted + 1].tolist() == nodes
        assert index[r, accepted + 1 :].tolist() == [-1] * (gamma - accepted)
        assert predicts[nodes].tolist() == emitted[r, : accepted + 1].tolist()
    untouched = set(range(rows * n)) - set(index[index >= 0].tolist())
    assert all(int(predicts[i]) == 0 for i in untouched)


@pytest.mark.usefixtures("rule")
def test_the_first_token_of_a_chain_follows_the_target() -> None:
    """A draft of probability 0.01 is kept in one of a hundred chains."""
    torch.manual_seed(2)
    rows, improbable = 8_000, 0.01
    target = torch.tensor([improbable, 1 - improbable]).expand(rows, 2, 2)
    sure = torch.tensor([1.0, 0.0]).expand(rows, 1, 2)  # drafted: always token 0
    predicts, gained, _ = verified(rows, 2, target, torch.zeros(rows, 2, dtype=torch.int64), sure)
    kept = int((gained - 1).sum())
    assert 40 < kept < 130, f"{kept} of {rows} kept, about {rows * improbable:.0f} expected"
    assert int((predicts.view(rows, 2)[:, 0] == 0).sum()) == kept


@pytest.mark.parametrize("greedy_like", [False, True])
def test_dflash_keeps_the_targets_distribution(greedy_like: bool) -> None:
    """First two tokens of 20,000 chains against the target's distribution."""
    torch.manual_seed(1)
    rows, n = 20_000, 3
    probs = random_probs(1, n)[0] if not greedy_like else torch.eye(VOCAB)[[4, 0, 1]]
    candidates = torch.tensor([[3, 4, 2]]).expand(rows, n)
    predicts, index, count, flat, following, sibling = chain_buffers(rows, n)
    accept.chain_speculative_sampling_target_only(
        predicts, index, count, candidates, flat, following, sibling,
        torch.rand(rows, n), torch.rand(rows), probs.expand(rows, n, VOCAB), torch.zeros(1),
    )  # fmt: skip
    tokens = predicts.view(rows, n)
    reached = count > 0  # the second token follows the first draft
    assert torch.equal(reached, tokens[:, 0] == candidates[:, 1])
    for seen, expected in ((tokens[:, 0], probs[0]), (tokens[reached, 1], probs[1])):
        share = torch.bincount(seen, minlength=VOCAB) / len(seen)
        error = (expected * (1 - expected) / len(seen)).sqrt()
        assert bool(((share - expected).abs() <= 4.5 * error + 1e-9).all()), share
    for r in range(50):
        length = int(count[r]) + 1
        assert index[r].tolist() == [*range(r * n, r * n + length), *[-1] * (n - length)]
        assert tokens[r, length:].tolist() == [-7] * (n - length), "nothing behind is written"
