"""Greedy choices against torch: ties, signed zeros, infinities, long and short rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_dspark.serving.cpu import greedy_ops, linear
from sglang_dspark.serving.cpu.weight_formats import FORMATS, pack
from sglang_dspark.verify import accept_greedy

FEW_VALUES = st.sampled_from([0.0, -0.0, 1.5, -1.5, float("inf"), float("-inf"), 1e-40, -1e-40])


@settings(deadline=None)  # the first call compiles
@given(rows=st.lists(st.lists(FEW_VALUES, min_size=1, max_size=9), min_size=1, max_size=4))
def test_the_first_of_equal_entries_is_found(rows: list[list[float]]) -> None:
    width = min(map(len, rows))
    values = torch.tensor([row[:width] for row in rows])
    assert greedy_ops.row_argmax(values).tolist() == values.argmax(-1).tolist()


@pytest.mark.parametrize("width", [1, 2047, 2048, 2049, 4096, 10_000])
@pytest.mark.parametrize("place", ["first", "last", "middle", "random"])
def test_rows_longer_than_a_block(width: int, place: str) -> None:
    torch.manual_seed(width)
    values = torch.randn(3, width)
    if place != "random":
        values[:, {"first": 0, "last": width - 1, "middle": width // 2}[place]] = 9.0
    assert torch.equal(greedy_ops.row_argmax(values), values.argmax(-1))


@pytest.mark.skipif(linear.prepare() is None, reason="no fused multiply-add")
@pytest.mark.parametrize("width", [16, 2512])
@pytest.mark.parametrize("requests", [1, 4, 7])
def test_a_draft_block_is_the_argmax_of_each_sum(requests: int, width: int) -> None:
    torch.manual_seed(width)
    vocab, rank, gamma = 3 * width, 32, 5
    base = torch.randn(requests, gamma, width).round(decimals=1)  # ties, taken by the first
    w1, w2 = (torch.randint(-1, 2, (n, rank)).float() for n in (vocab, width))
    tokens = torch.randperm(vocab)[:width]
    anchor = torch.randint(vocab, (requests,))
    weights = (w1.numpy(), w2, tokens.numpy())
    whole, pieces = (torch.zeros(requests, gamma, dtype=torch.long) for _ in range(2))
    greedy_ops.draft_steps(base, anchor, weights, whole, range(gamma))
    previous = anchor
    for k in range(gamma):
        greedy_ops.draft_steps(base, previous, weights, pieces, range(k, k + 1))
        previous = tokens[(base[:, k] + w1[previous] @ w2.T).argmax(-1)]
        assert torch.equal(whole[:, k], previous)
    assert torch.equal(pieces, whole)


@pytest.mark.skipif(linear.prepare() is None, reason="no fused multiply-add")
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
@pytest.mark.parametrize("requests", [1, 4, 7])
def test_a_draft_block_with_packed_factors(requests: int, form: str) -> None:
    """A row's product has the same bits whatever shares it, so no token may differ."""
    torch.manual_seed(requests)
    vocab, width, rank, gamma = 900, 320, 128, 5
    base, w1 = torch.randn(requests, gamma, width), torch.randn(vocab, rank)
    w2 = pack(torch.randn(width, rank), FORMATS[form])
    tokens, anchor = torch.randperm(vocab)[:width], torch.randint(vocab, (requests,))
    out = torch.zeros(requests, gamma, dtype=torch.long)
    greedy_ops.draft_steps(base, anchor, (w1.numpy(), w2, tokens.numpy()), out, range(gamma))
    previous = anchor
    for k in range(gamma):
        bias = linear.product(w1[previous], w2)
        previous = tokens[(base[:, k] + bias).argmax(-1)]
        assert torch.equal(out[:, k], previous)
    assert not torch.equal(out[:, 0], tokens[base[:, 0].argmax(-1)])  # the bias decided


def windows(agreeing: list[int], gamma: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Windows whose first agreeing[r] drafts are the target's choice, and the target's logits."""
    logits = torch.randn(len(agreeing), gamma + 1, vocab)
    choice = logits.argmax(-1)
    window = torch.cat([torch.zeros(len(agreeing), 1, dtype=torch.long), choice[:, :-1]], 1)
    for r, count in enumerate(agreeing):
        if count < gamma:
            window[r, count + 1] = (window[r, count + 1] + 1) % vocab
    return window, logits


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_accepts_what_the_reference_rule_accepts(gamma: int) -> None:
    torch.manual_seed(gamma)
    agreeing = [min(n, gamma) for n in (0, 1, 2, 3, 4, 5)]
    window, logits = windows(agreeing, gamma, 3000)
    accepted, bonus = greedy_ops.accept_window(window, logits.view(-1, 3000))
    reference = accept_greedy(window[:, 1:], logits.argmax(-1))
    assert accepted.tolist() == agreeing == reference.accepted.tolist()
    assert torch.equal(bonus, reference.bonus)


@pytest.mark.parametrize("gamma", [1, 5])
def test_the_hook_answers_as_upstream(gamma: int) -> None:
    accept = pytest.importorskip("sglang.kernels.ops.speculative.dspark.dspark_accept")
    from sglang_dspark.serving.cpu import commit

    torch.manual_seed(7)
    window, logits = windows([0, gamma, 1], gamma, 50)
    for cutoff in (None, torch.tensor([1, 2, 1])):
        arguments = {
            "candidates": window,
            "target_logits": logits.view(-1, 50),
            "verify_num_draft_tokens": gamma + 1,
            "cutoff_verify_lens": cutoff,
        }
        ours = commit.accept_greedy(accept.accept_greedy, **arguments)
        for mine, theirs in zip(ours, accept.accept_greedy(**arguments), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
