"""Turns mixed chunks off under DSPARK.

The hook: `sglang_dspark/serving/mixed_chunks.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import mixed_chunks

SEAMS = (
    Seam(
        name="mixed-chunks",
        target="sglang.srt.arg_groups.speculative_hook._handle_dspark",
        kind="after",
        hook=mixed_chunks.leave_out,
        signature="(server_args)",
        why="a mixed step draws tokens by counts of output tokens that DSPARK's steps do not keep",
    ),
)
