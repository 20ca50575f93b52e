"""The rows that a draft hands to the compiled layers, which read contiguous positions and slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.backends.cpu import draft as draft_module
from tests.backends.cpu.step_world import worker_for

GAMMA, WIDTH = 5, 8


@pytest.mark.parametrize("depth", [1, 2, GAMMA])
@pytest.mark.parametrize("requests", [1, 3])
def test_rows_of_every_depth_are_read_by_the_compiled_layers(
    requests: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []

    def run(runner: Any, model: Any, layer_of: Any, window: Any) -> tuple[torch.Tensor, list[Any]]:
        read.append(window)
        return torch.zeros(requests * depth, WIDTH), []

    monkeypatch.setattr(draft_module.direct_forward, "run", run)
    monkeypatch.setattr(draft_module.direct_forward, "supports_pass", lambda *_: True)
    model = SimpleNamespace(confidence_head=object(), embed_tokens=None)
    pool = SimpleNamespace(req_to_token=None)
    runner = SimpleNamespace(model=model, req_to_token_pool=pool)
    drafter = draft_module.Drafter(worker_for(GAMMA, draft_model=model, draft_model_runner=runner))
    places = torch.arange(requests * (GAMMA + 1)).view(requests, -1)
    window = SimpleNamespace(positions_2d=places, verify_cache_loc_2d=places + 100)
    batch = SimpleNamespace(req_pool_indices=None, seq_lens=None)
    hidden = drafter._hidden(batch, torch.zeros(requests, depth, dtype=torch.int64), window)
    assert hidden.shape == (requests * depth, WIDTH)
    (given,) = read
    for found, first in ((given.positions, 0), (given.out_cache_loc, 100)):
        assert found.is_contiguous()
        assert found.tolist() == (places[:, :depth] + first).flatten().tolist()
