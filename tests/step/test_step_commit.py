"""A step's result is copied out of a graph's own buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.step.decode import result_of
from sglang_dspark.step.verify import VerifyOutput


@pytest.mark.parametrize("folded", [True, False])
def test_results_outlive_the_graphs_next_replay(folded: bool) -> None:
    """Without overlap lengths become the next batch's, and the replay that writes the buffer anew
    comes before positions are read from them. With overlap it may come before the host's copy of
    tokens and counts."""
    buffer = torch.tensor([11, 7])
    tokens, counts = torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 1], dtype=torch.int32)
    accepted: Any = SimpleNamespace(
        out_tokens=tokens,
        commit_lens=counts,
        bonus=torch.zeros(2, dtype=torch.int64),
        new_seq_lens=buffer,
    )
    worker = SimpleNamespace(verify_num_draft_tokens=4, _block_accept_lens=lambda **_: None)
    layout = SimpleNamespace(verify_lens=torch.tensor([3, 1]))
    asked: Any = SimpleNamespace(layout=layout, requests=2)
    found = result_of(worker, asked, VerifyOutput(None, None, folded, folded), accepted)
    assert found.new_seq_lens.tolist() == [11, 7]
    assert found.next_draft_input.new_seq_lens is found.new_seq_lens
    assert (found.cap_lens.tolist(), found.cap_lens.dtype) == ([3, 1], torch.int32)
    for each in (buffer, tokens, counts):
        each += 100
    assert found.new_seq_lens.tolist() == ([11, 7] if folded else [111, 107])
    assert found.next_token_ids.tolist() == ([1, 2, 3, 4] if folded else [101, 102, 103, 104])
    assert found.accept_lens.tolist() == ([2, 1] if folded else [102, 101])
