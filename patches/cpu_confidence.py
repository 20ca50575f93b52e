"""The confidence of a drafted block without a chain of small tensor operations.

The hooks: `sglang_dspark/serving/cpu/confidence.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving.cpu import confidence

SEAMS = (
    Seam(
        name="cpu-draft-confidence",
        target="sglang.srt.models.dspark.DSparkDraftMixin.compute_confidence",
        kind="around",
        hook=confidence.compute_confidence,
        signature="(self, *, anchor_tokens, draft_tokens, confidence_features)",
        why="upstream's dozen tensor operations take 0.3 ms of a step, their arithmetic 5 us",
        device="cpu",
    ),
)
