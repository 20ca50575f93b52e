"""Applies penalties in one order in every process.

The hook: `sglang_dspark/serving/penalty_order.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import penalty_order

SEAMS = (
    Seam(
        name="penalty-order",
        target="sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.__init__",
        kind="before",
        hook=penalty_order.sort_penalizers,
        signature="(self, vocab_size, batch, penalizers)",
        why="upstream applies a set of penalties in its order, which differs between processes",
    ),
)
