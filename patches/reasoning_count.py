"""Counts no reasoning token behind an answer's end.

The hooks: `sglang_dspark/serving/reasoning_count.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import reasoning_count

_PROCESSOR = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
_WHY = (
    "upstream counts a step's reasoning tokens before it drops those behind the end, so they "
    "exceed the completion tokens (sglang#39826)"
)

SEAMS = (
    Seam(
        name="reasoning-defer",
        target=f"{_PROCESSOR}._maybe_update_reasoning_tokens",
        kind="around",
        hook=reasoning_count.defer,
        signature="(self, req, next_token_id)",
        why=_WHY,
    ),
    Seam(
        name="reasoning-count",
        target=f"{_PROCESSOR}._handle_finish_state_updated_req",
        kind="before",
        hook=reasoning_count.count_kept,
        signature="(self, req, batch, result, i, logits_output)",
        why=_WHY,
    ),
)
