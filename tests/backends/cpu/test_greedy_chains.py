"""Greedy verification of chains in one call against SGLang's own walk over the same trees."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.backends.cpu import greedy_ops
from sglang_dspark.backends.cpu.greedy_ops import verify_chains
from sglang_dspark.backends.cpu.sgl_kernel_ops import verify_tree_greedy_cpu
from tests.backends.cpu.operator_levels import LEVELS, force_level

VOCAB = 23


@pytest.mark.parametrize("level", [*LEVELS, None])
@pytest.mark.parametrize(("requests", "n"), [(1, 2), (5, 2), (7, 4), (3, 1)])
def test_accepts_what_the_walk_over_trees_accepts(
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
        following = torch.arange(1, n + 1).repeat(requests, 1)
        following[:, -1] = -1
        predicted = torch.zeros(requests * n, dtype=torch.int32)
        index = torch.full((requests, n), -1, dtype=torch.int32)
        accepted = torch.empty(requests, dtype=torch.int32)
        verify_tree_greedy_cpu(
            predicts=predicted,
            accept_index=index,
            accept_token_num=accepted,
            candidates=window,
            retrive_index=torch.arange(requests * n).view(requests, n),
            retrive_next_token=following,
            retrive_next_sibling=torch.full((requests, n), -1),
            target_predict=likely,
        )
        ours = verify_chains(window, logits)
        for mine, theirs in zip(ours, (predicted, index, accepted + 1), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        seen.update(accepted.tolist())
    assert seen == set(range(n))  # every number of accepted drafts occurred
