"""Counts the drafts that were verified in an answer's meta_info.

The hook: `sglang_dspark/serving/drafted_counts.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import drafted_counts

SEAMS = (
    Seam(
        name="drafted-counts",
        target=(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager"
            "._calculate_spec_decoding_metrics"
        ),
        kind="after",
        hook=drafted_counts.count_drafted,
        signature="(self, meta_info, recv_obj, i)",
        why="upstream counts gamma drafts a step, also where scheduling verified fewer or none",
    ),
)
