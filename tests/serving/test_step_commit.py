"""A step's result: what a graph wrote is not handed on as it lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.serving.step.commit import result_of
from sglang_dspark.serving.step.passes import Verified


@pytest.mark.parametrize("folded", [True, False])
def test_lengths_outlive_the_graphs_next_replay(folded: bool) -> None:
    """Without overlap they become the next batch's lengths, and the replay that writes the buffer
    anew comes before positions are read from them."""
    buffer = torch.tensor([11, 7])
    accepted: Any = SimpleNamespace(
        out_tokens=torch.zeros(2, 4, dtype=torch.int64),
        commit_lens=torch.ones(2, dtype=torch.int32),
        bonus=torch.zeros(2, dtype=torch.int64),
        new_seq_lens=buffer,
    )
    worker = SimpleNamespace(verify_num_draft_tokens=4, _block_accept_lens=lambda **_: None)
    asked: Any = SimpleNamespace(layout=None, requests=2)
    found = result_of(worker, asked, Verified(None, None, folded, folded), accepted)
    assert found.new_seq_lens.tolist() == [11, 7]
    assert found.next_draft_input.new_seq_lens is found.new_seq_lens
    buffer += 100
    assert found.new_seq_lens.tolist() == ([11, 7] if folded else [111, 107])
