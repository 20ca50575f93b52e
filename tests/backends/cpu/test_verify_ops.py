"""Sampling-verify operators: the bookkeeping exactly, the law of the tokens by frequency."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import verify_ops
from sglang_dspark.verify import accept_sampled

VOCAB = 5


def laws(rows: int, width: int) -> Tensor:
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


def test_chain_writes_what_the_accept_rule_says() -> None:
    torch.manual_seed(0)
    rows, gamma = 64, 4
    n = gamma + 1
    target, draft_law = laws(rows, n), laws(rows, gamma)
    candidates = torch.randint(0, VOCAB, (rows, n))
    coins, last = torch.rand(rows, gamma), torch.rand(rows)
    predicts, index, count, flat, following, sibling = chain_buffers(rows, n)
    verify_ops.chain_speculative_sampling(
        predicts, index, count, candidates, flat, following, sibling, coins, last, target,
        draft_law, 1.0, 1.0, True,
    )  # fmt: skip
    want = accept_sampled(candidates[:, 1:], draft_law, target, coins, last)
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
    assert all(int(predicts[i]) == -7 for i in untouched)


def test_a_coin_of_zero_keeps_no_improbable_draft() -> None:
    """Upstream's coins are multiples of 2^-24; the bits below decide what one of 0 keeps."""
    torch.manual_seed(2)
    rows, improbable = 4000, 1e-9
    target = torch.tensor([improbable, 1 - improbable]).expand(rows, 2, 2)
    sure = torch.tensor([1.0, 0.0]).expand(rows, 1, 2)  # the drafter's law: always token 0
    predicts, index, count, flat, following, sibling = chain_buffers(rows, 2)
    verify_ops.chain_speculative_sampling(
        predicts, index, count, torch.zeros(rows, 2, dtype=torch.int64), flat, following, sibling,
        torch.zeros(rows, 1), torch.rand(rows), target, sure, 1.0, 1.0, True,
    )  # fmt: skip
    kept = int(count.sum())
    assert 20 < kept < 150, f"{kept} of {rows} kept, about {rows * improbable * 2**24:.0f} expected"


def test_block_verification_is_refused() -> None:
    predicts, index, count, flat, following, sibling = chain_buffers(1, 2)
    with pytest.raises(NotImplementedError, match="block verification"):
        verify_ops.chain_speculative_sampling(
            predicts, index, count, torch.zeros(1, 2), flat, following, sibling,
            torch.rand(1, 1), torch.rand(1), laws(1, 2), laws(1, 1), 1.0, 1.0, True,
            block_verification=True,
        )  # fmt: skip


@pytest.mark.parametrize("greedy_like", [False, True])
def test_tree_rule_keeps_the_targets_law(greedy_like: bool) -> None:
    """First token of a tree whose root has two children, 12,000 times, against the target."""
    torch.manual_seed(1)
    trials, n = 12_000, 3
    law = laws(1, n)[0] if not greedy_like else torch.eye(VOCAB)[[2, 0, 1]]
    predicts = torch.empty(n, dtype=torch.int32)
    candidates = torch.tensor([[4, 2, 1]])
    child, sibling = torch.tensor([[1, -1, -1]]), torch.tensor([[-1, 2, -1]])
    seen = torch.zeros(VOCAB)
    for coins, last in zip(torch.rand(trials, 1, n), torch.rand(trials, 1), strict=True):
        verify_ops.tree_speculative_sampling_target_only(
            predicts, torch.full((1, 2), -1), torch.empty(1), candidates,
            torch.arange(n)[None], child, sibling, coins, last, law[None], torch.zeros(1, n, VOCAB),
        )  # fmt: skip
        seen[int(predicts[0])] += 1
    error = (law[0] * (1 - law[0]) / trials).sqrt()
    assert bool(((seen / trials - law[0]).abs() <= 4.5 * error + 1e-9).all()), seen / trials


def test_tree_rule_stops_at_the_depth_limit() -> None:
    law = torch.eye(VOCAB)[[1, 2, 3]][None]
    predicts, index, count, flat, following, sibling = chain_buffers(1, 3)
    verify_ops.tree_speculative_sampling_target_only(
        predicts, index[:, :2], count, torch.tensor([[0, 1, 2]]), flat, following, sibling,
        torch.rand(1, 3), torch.rand(1), law, torch.zeros(1, 3, VOCAB),
    )  # fmt: skip
    assert count.tolist() == [1]
    assert index.tolist() == [[0, 1, -1]]
    assert predicts.tolist() == [1, 2, -7]


def test_top_k_keeps_the_largest_and_renormalises() -> None:
    torch.manual_seed(2)
    probs = laws(4, 1)[:, 0]
    limits = torch.tensor([1, 3, VOCAB, 1 << 30])
    kept = verify_ops.top_k_renorm_prob(probs, limits)
    for r, k in enumerate([1, 3, VOCAB, VOCAB]):
        want = torch.zeros(VOCAB)
        best = probs[r].argsort(descending=True)[:k]
        want[best] = probs[r, best] / probs[r, best].sum()
        torch.testing.assert_close(kept[r], want)
    everything = verify_ops.top_k_renorm_prob(probs, torch.full((4,), VOCAB))
    torch.testing.assert_close(everything, probs)


def test_top_p_keeps_the_leading_mass_and_renormalises() -> None:
    probs = torch.tensor([[0.5, 0.1, 0.3, 0.1, 0.0]] * 3)
    kept = verify_ops.top_p_renorm_prob(probs, torch.tensor([0.4, 0.7, 1.0]))
    torch.testing.assert_close(kept[0], torch.tensor([1.0, 0, 0, 0, 0]))
    torch.testing.assert_close(kept[1], torch.tensor([0.625, 0, 0.375, 0, 0]))
    torch.testing.assert_close(kept[2], probs[2])
