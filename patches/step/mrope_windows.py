"""Give packed verify windows their positions of three parts (mRoPE: Qwen2.5-VL, Qwen3.5).

Upstream: `ForwardBatch.compute_spec_mrope_positions`
(sglang/srt/model_executor/forward_batch_info.py) takes all windows for equally long. Behind a
prompt a token has one position in all three parts: its own, moved by the request's images. To drop
when upstream computes them (sgl-project/sglang#38899).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_dspark.patches.seam import Seams

SEAMS = Seams()


@SEAMS.around(
    "mrope-windows",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.compute_spec_mrope_positions",
    why="upstream takes all windows for equally long",
)
def windows_positions(
    original: Callable[..., None],
    self: Any,
    model_runner: Any,
    batch: Any,
    seq_positions: Any = None,
) -> None:
    """Set `mrope_positions` [3, N] of packed windows (AROUND hook)."""
    layout = getattr(batch.spec_info, "ragged_verify_layout", None)
    if layout is None or seq_positions is not None:
        original(self, model_runner, batch, seq_positions)
        return
    positions = batch.spec_info.positions.to(torch.int64)
    if any(each is not None for each in batch.multimodal_inputs or ()):
        moved = [
            0 if each is None else int(each.mrope_position_delta.flatten()[0])
            for each in batch.multimodal_inputs
        ]
        starts = layout.qo_indptr_device
        row = torch.arange(len(positions), dtype=starts.dtype, device=starts.device)
        request = torch.searchsorted(starts[1:], row, right=True).clamp_(max=len(moved) - 1)
        positions = positions + torch.tensor(moved).to(positions.device, non_blocking=True)[request]
    self.mrope_positions = positions.unsqueeze(0).repeat(3, 1)
