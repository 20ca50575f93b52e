"""Greedy choices against torch: ties, signed zeros, infinities, long and short rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.backends.cpu import greedy_ops, linear, reduced_head
from sglang_dspark.backends.cpu.weight_formats import FORMATS, pack
from tests.backends.cpu.operator_levels import LEVELS, force_level

FEW_VALUES = st.sampled_from([0.0, -0.0, 1.5, -1.5, float("inf"), float("-inf"), 1e-40, -1e-40])


@pytest.mark.parametrize("level", [*LEVELS, None])
@settings(deadline=None)  # the first call builds
@given(rows=st.lists(st.lists(FEW_VALUES, min_size=1, max_size=9), min_size=1, max_size=4))
def test_the_first_of_equal_entries_is_found(level: str | None, rows: list[list[float]]) -> None:
    width = min(map(len, rows))
    values = torch.tensor([row[:width] for row in rows])
    with pytest.MonkeyPatch.context() as patch:
        force_level(patch, greedy_ops, level)
        assert greedy_ops.row_argmax(values).tolist() == values.argmax(-1).tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("width", [1, 2047, 2048, 2049, 4096, 10_000])
@pytest.mark.parametrize("place", ["first", "last", "middle", "random"])
def test_rows_longer_than_a_block(
    width: int, place: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_level(monkeypatch, greedy_ops, level)
    torch.manual_seed(width)
    values = torch.randn(3, width)
    if place != "random":
        values[:, {"first": 0, "last": width - 1, "middle": width // 2}[place]] = 9.0
    assert torch.equal(greedy_ops.row_argmax(values), values.argmax(-1))


@pytest.mark.skipif(linear.prepare() is None, reason="no fused multiply-add")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("width", [16, 2512])
@pytest.mark.parametrize("requests", [1, 4, 7])
def test_a_draft_block_is_the_argmax_of_each_sum(
    requests: int, width: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_level(monkeypatch, reduced_head, level)
    torch.manual_seed(width)
    vocab, rank, gamma = 3 * width, 32, 5
    base = torch.randn(requests, gamma, width).round(decimals=1)  # ties, taken by the first
    w1, w2 = (torch.randint(-1, 2, (n, rank)).float() for n in (vocab, width))
    tokens = torch.randperm(vocab)[:width]
    anchor = torch.randint(vocab, (requests,))
    head = reduced_head.ReducedHead(tokens, torch.empty(width, 1), w1, w2)
    whole, pieces = (torch.zeros(requests, gamma, dtype=torch.long) for _ in range(2))
    reduced_head.draft_steps(head, base, anchor, whole, range(gamma), None)
    previous = anchor
    for k in range(gamma):
        reduced_head.draft_steps(head, base, previous, pieces, range(k, k + 1), None)
        previous = tokens[(base[:, k] + w1[previous] @ w2.T).argmax(-1)]
        assert torch.equal(whole[:, k], previous)
    assert torch.equal(pieces, whole)


@pytest.mark.skipif(linear.prepare() is None, reason="no fused multiply-add")
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
@pytest.mark.parametrize("requests", [1, 4, 7])
def test_a_draft_block_with_packed_factors(requests: int, form: str) -> None:
    """A row's product is bitwise equal in every batch, so no token may differ."""
    torch.manual_seed(requests)
    vocab, width, rank, gamma = 900, 320, 128, 5
    base, w1 = torch.randn(requests, gamma, width), torch.randn(vocab, rank)
    w2 = pack(torch.randn(width, rank), FORMATS[form])
    tokens, anchor = torch.randperm(vocab)[:width], torch.randint(vocab, (requests,))
    out = torch.zeros(requests, gamma, dtype=torch.long)
    head = reduced_head.ReducedHead(tokens, torch.empty(width, 1), w1, w2)
    reduced_head.draft_steps(head, base, anchor, out, range(gamma), None)
    previous = anchor
    for k in range(gamma):
        bias = linear.product(w1[previous], w2)
        previous = tokens[(base[:, k] + bias).argmax(-1)]
        assert torch.equal(out[:, k], previous)
    assert not torch.equal(out[:, 0], tokens[base[:, 0].argmax(-1)])  # the bias decided
