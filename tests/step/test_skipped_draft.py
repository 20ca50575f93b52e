"""A step that drafts nothing still hands SGLang a proposal, of drafts that are not verified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.step.draft import skip

GAMMA = 3


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_skipped_draft_has_the_anchors_and_no_drafts(in_graph: bool) -> None:
    ids = torch.full((2, GAMMA + 1), 5)
    proposer = SimpleNamespace(draft_block_ids_view=lambda bs, device: ids[:bs])
    asked = []
    device = SimpleNamespace(accepts_in_graph=lambda *given: asked.append(given) or in_graph)
    state: Any = SimpleNamespace(
        worker=SimpleNamespace(_proposer=proposer, gamma=GAMMA), device=device
    )
    info = SimpleNamespace(
        is_all_greedy=False,
        temperatures=torch.tensor([[0.7], [1.0]]),
        top_ks=torch.tensor([20, 1], dtype=torch.int32),
    )
    batch = SimpleNamespace(
        seq_lens=torch.tensor([9, 4]),
        spec_info=SimpleNamespace(bonus_tokens=torch.tensor([11, 12])),
        sampling_info=info,
    )
    found = skip(state, batch)
    assert found.draft_block_ids is ids or found.draft_block_ids.data_ptr() == ids.data_ptr()
    assert ids[:, 0].tolist() == [11, 12]
    block = found.draft_block
    assert block.draft_tokens.tolist() == [[0] * GAMMA] * 2
    assert (block.corrected_logits, block.greedy_draft) == (None, True)
    assert block.greedy_mask.tolist() == [False, True]
    assert block.temperatures.flatten().tolist() == pytest.approx([0.7, 1.0])
    assert (found.folded, asked) == (in_graph, [(2, 0)])
    assert (found.confidence, found.confidence_raw) == (None, None)
