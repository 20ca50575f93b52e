"""Greedy verification of chains in one call against a walk over each of them."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.backends.cpu import greedy_ops
from sglang_dspark.backends.cpu.greedy_ops import verify_chains
from tests.backends.cpu.operator_levels import LEVELS, force_level

VOCAB = 23


@pytest.mark.parametrize("level", [*LEVELS, None])
@pytest.mark.parametrize(("requests", "n"), [(1, 2), (5, 2), (7, 4), (3, 1)])
def test_accepts_what_a_walk_accepts(
    requests: int, n: int, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_level(monkeypatch, greedy_ops, level)
    generator = torch.Generator().manual_seed(requests * n)
    seen = set()
    for _ in range(20):
        logits = torch.randn(requests * n, VOCAB, generator=generator)
        window = torch.randint(0, VOCAB, (requests, n), generator=generator)
        likely = logits.argmax(-1).view(requests, n)
        agree = torch.rand(requests, n, generator=generator) < 0.6
        window[:, 1:] = torch.where(agree, likely, window)[:, :-1].clone()
        predicted = torch.zeros(requests * n, dtype=torch.int32)
        index = torch.full((requests, n), -1, dtype=torch.int32)
        gained = torch.empty(requests, dtype=torch.int32)
        for r in range(requests):
            length = 1
            while length < n and window[r, length] == likely[r, length - 1]:
                length += 1
            gained[r] = length
            index[r, :length] = torch.arange(r * n, r * n + length)
            predicted[r * n : r * n + length] = likely[r, :length]
        ours = verify_chains(window, logits)
        for mine, theirs in zip(ours, (predicted, index, gained), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        seen.update(gained.tolist())
    assert seen == set(range(1, n + 1))  # every number of accepted drafts occurred
