"""Trims decode graph sizes to the running requests that SGLang sets for DSPARK.

The hook: `sglang_dspark/backends/cuda/graph_sizes.py`.
"""

from __future__ import annotations

from sglang_dspark.backends.cuda import graph_sizes
from sglang_dspark.patches.seam import Seam

SEAMS = (
    Seam(
        name="cuda-graph-sizes",
        target="sglang.srt.arg_groups.speculative_hook._handle_dspark",
        kind="after",
        hook=graph_sizes.trim_decode_sizes,
        signature="(server_args)",
        why="upstream allocates logits for graphs of 256 requests that a server of 48 never runs",
        device="cuda",
    ),
)
