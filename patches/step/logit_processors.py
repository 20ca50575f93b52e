"""Refuses custom logit processors that cannot be loaded, or where every draft is verified.

The hook: `sglang_dspark/step/processors.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.step import processors

SEAMS = (
    Seam(
        name="logit-processors",
        target="sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
        kind="after",
        hook=processors.check_processor,
        signature="(self, req)",
        why="a processor that reads the answer sees the anchor's in every row of a window",
    ),
)
