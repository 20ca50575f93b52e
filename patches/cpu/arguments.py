"""Lets the speculative algorithms be asked for on a CPU, with overlap scheduling.

The hooks: `sglang_dspark/backends/cpu/arguments.py`.
"""

from __future__ import annotations

from sglang_dspark.backends.cpu import arguments
from sglang_dspark.patches.seam import Seam

SEAMS = (
    Seam(
        name="cpu-dspark-device",
        target="sglang.srt.arg_groups.speculative_hook._handle_dspark",
        kind="around",
        hook=arguments.handle_dspark,
        signature="(server_args)",
        why="upstream rejects DSPARK by the device's name",
        device="cpu",
    ),
    Seam(
        name="cpu-spec-overlap",
        target="sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu",
        kind="replace",
        hook=arguments.keep_overlap,
        signature="(server_args)",
        why="upstream turns the overlap schedule off for EAGLE and NGRAM on a CPU",
        device="cpu",
    ),
)
