"""Ignores empty stop strings and stop patterns.

The hook: `sglang_dspark/serving/empty_stops.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import empty_stops

SEAMS = (
    Seam(
        name="empty-stops",
        target="sglang.srt.sampling.sampling_params.SamplingParams.normalize",
        kind="before",
        hook=empty_stops.drop_empty,
        signature="(self, tokenizer)",
        why="upstream ends an answer with an empty stop string at its first token (sglang#38712)",
    ),
)
