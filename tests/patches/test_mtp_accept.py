"""Acceptance of EAGLE's chains on a CPU: what is adjusted before, and in which order it returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.patches.cpu import mtp

R, N, V = 2, 3, 7


def asked(**settings: Any) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Chains of which the target takes two drafts and none; a batch of greedy requests."""
    window = torch.tensor([[0, 1, 2], [0, 5, 1]])
    info = dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "logit_bias"))
    sampling = SimpleNamespace(**info | {"is_all_greedy": True} | settings)
    mode = SimpleNamespace(is_idle=lambda: False)
    return (
        SimpleNamespace(draft_token=window.flatten(), draft_token_num=N),
        SimpleNamespace(forward_mode=mode, sampling_info=sampling),
    )


def accepted(grammar_mask: Any = None, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, lengths and rows; the target's likeliest tokens are 1, 2, 3 and 4, 1, 6."""
    likely = torch.tensor([1, 2, 3, 4, 1, 6])
    logits = torch.zeros(R * N, V).scatter_(1, likely[:, None], 1.0)
    output = SimpleNamespace(next_token_logits=logits)

    def original(*_: Any) -> None:
        pytest.fail("upstream's walk was called")

    return mtp.accept_drafts(original, *asked(**settings), output, grammar_mask)  # type: ignore[no-any-return]


def test_greedy_chains_by_hand() -> None:
    tokens, lengths, rows = accepted()
    assert lengths.tolist() == [3, 1]
    assert tokens.tolist() == [1, 2, 3, 4, 0, 0]
    assert rows.tolist() == [[0, 1, 2], [3, -1, -1]]


def test_what_a_request_asks_for_is_applied_to_all_its_rows() -> None:
    """A bias makes the second request's first draft likeliest; a penalty ends the first one's."""
    bias, penalty = torch.zeros(R, V), torch.zeros(R, V)
    bias[1, 5], penalty[0, 2], penalty[1, 4] = 0.6, -2.0, -0.5
    tokens, lengths, _ = accepted(logit_bias=bias, acc_additive_penalties=penalty)
    assert lengths.tolist() == [2, 3]
    assert tokens[:2].tolist() == [1, 0]
    assert int(tokens[3]) == 5


def test_a_grammar_decides_what_is_likeliest() -> None:
    def apply(logits: Tensor) -> None:
        logits[:, 1] = -torch.inf

    tokens, lengths, _ = accepted(SimpleNamespace(apply=apply))
    assert lengths.tolist() == [1, 1]
    assert int(tokens[0]) == 0
