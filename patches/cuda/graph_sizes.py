"""Trim decode graph sizes to the running requests that SGLang sets for DSPARK.

Upstream trims the sizes to a named `--max-running-requests` in arg_groups/memory_hook.py,
but sets 48 running requests for DSPARK only afterwards, in `_handle_dspark`. The graph runner
captures none of the larger sizes (`get_batch_sizes_to_capture`), yet `DsparkDraftSampler`
allocates for the largest, and `DsparkVerifyEpilogue` where it accepts by SGLang's rule: 256
requests on a card of 80 GB, with a vocabulary of 151,936 and gamma 7, are 0.5 GB of draft logits
and 1.2 GB of logits, of which 48 requests use 19%.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream

SEAMS = Seams(device="cuda")
logger = logging.getLogger(__name__)


@SEAMS.after(
    "cuda-graph-sizes",
    "sglang.srt.arg_groups.speculative_hook._handle_dspark",
    why="upstream allocates logits for graphs of 256 requests that a server of 48 never runs",
)
def trim_decode_sizes(result: None, server_args: Any) -> None:
    """Trim the sizes, unless the user named them (AFTER hook of `_handle_dspark`)."""
    args = upstream.resolving_view(server_args)
    decode, running = args.cuda_graph_config.decode, int(args.max_running_requests)
    decode_phase = upstream.Phase.DECODE
    by_name = {(decode_phase, "max_bs"), (decode_phase, "bs")}
    named = by_name & server_args._cuda_graph_config_locked
    captures = decode.backend != upstream.Backend.DISABLED
    if named or not captures or not decode.bs or max(decode.bs) <= running:
        return
    sizes = upstream.generate_decode_cuda_graph_batch_sizes(server_args, running)
    logger.info(
        "sglang-dspark: decode graphs are sized for %d running requests, not %d; "
        "--cuda-graph-max-bs-decode names another size",
        running,
        max(decode.bs),
    )
    upstream.declare_resolution(
        server_args,
        "sglang_dspark.trim_decode_sizes",
        cuda_graph_config=upstream.with_phase(
            args.cuda_graph_config, decode_phase, bs=sizes, max_bs=running
        ),
    )
