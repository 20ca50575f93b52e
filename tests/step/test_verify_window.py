"""Windows of a step: positions and cache slots of every place, from SGLang's own planner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.step.verify import window_of

WIDTH = 4
BOUND, LENS = torch.tensor([9, 20]), torch.tensor([7, 20])


class Translator:
    """SGLang's index of the cache, of slots 100, 101, ...; notes what it plans by."""

    def __init__(self) -> None:
        self.planned: dict[str, Any] = {}

    def plan_uniform_extend(self, **planned: Any) -> Any:
        self.planned = planned
        places = len(planned["seq_lens"]) * planned["width"]
        return SimpleNamespace(write_virtual=100 + torch.arange(places))


@pytest.mark.parametrize(("host_lens", "bound"), [(BOUND, BOUND), (None, LENS)])
def test_windows_begin_at_the_anchors(host_lens: Any, bound: torch.Tensor) -> None:
    """Of a batch whose lengths are not on the host, the drafter's bound of them is used."""
    translator = Translator()
    worker = SimpleNamespace(
        device="cpu",
        verify_num_draft_tokens=WIDTH,
        _block_pos_offsets=torch.arange(WIDTH),
        model_runner=SimpleNamespace(kv_index_translator=translator),
    )
    batch = SimpleNamespace(
        seq_lens=torch.tensor([5, 20]),
        seq_lens_cpu=host_lens,
        req_pool_indices=torch.tensor([3, 1]),
        spec_info=SimpleNamespace(nxt_kv_lens_cpu=LENS),
    )
    window = window_of(worker, batch)
    assert window.positions_2d.tolist() == [[5, 6, 7, 8], [20, 21, 22, 23]]
    assert window.verify_cache_loc_2d.tolist() == [[100, 101, 102, 103], [104, 105, 106, 107]]
    assert translator.planned["seq_lens_cpu"] is bound
    assert translator.planned["req_pool_indices"] is batch.req_pool_indices
