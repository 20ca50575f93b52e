"""Refuse custom logit processors that cannot be loaded, or where every draft is verified."""

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
        why="a processor that reads the output sees that of the anchor in every row of a window",
    ),
)
