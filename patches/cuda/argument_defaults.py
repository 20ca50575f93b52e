"""Set arguments that the user left open: sizes of decode graphs, and our warm-up.

Upstream trims the sizes to a named `--max-running-requests` in arg_groups/memory_hook.py,
but sets 48 running requests for DSPARK only afterwards, in `_handle_dspark`. The graph runner
captures none of the larger sizes (`get_batch_sizes_to_capture`), yet `DsparkDraftSampler`
allocates for the largest, and `DsparkVerifyEpilogue` where it accepts by SGLang's rule: 256
requests on a card of 80 GB, with a vocabulary of 151,936 and gamma 7, are 0.5 GB of draft logits
and 1.2 GB of logits, of which 48 requests use 19%.

sglang/srt/entrypoints/http_server.py, `lifespan`, answers the requests of each warm-up that
`--warmups` names before HTTP is served. Ours: `sglang_dspark.serving.warm_up`.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream, warm_up

SEAMS = Seams(device="cuda")
logger = logging.getLogger(__name__)


@SEAMS.after(
    "cuda-graph-sizes",
    "sglang.srt.arg_groups.speculative_hook._handle_dspark",
    why="upstream allocates logits for graphs of 256 requests that a server of 48 never runs",
)
def trim_decode_sizes(result: None, server_args: Any) -> None:
    """Trim the sizes, unless the user named them (AFTER hook of `_handle_dspark`)."""
    args, phase = upstream.resolving_view(server_args), upstream.Phase.DECODE
    decode, running = args.cuda_graph_config.decode, int(args.max_running_requests)
    named = {(phase, "max_bs"), (phase, "bs")} & server_args._cuda_graph_config_locked
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
    trimmed = upstream.with_phase(args.cuda_graph_config, phase, bs=sizes, max_bs=running)
    upstream.declare_resolution(
        server_args, "sglang_dspark.trim_decode_sizes", cuda_graph_config=trimmed
    )


@SEAMS.after(
    "cuda-warm-up",
    "sglang.srt.arg_groups.speculative_hook._handle_dspark",
    why="upstream's one warm-up request compiles kernels for one request alone; the others "
    "compile while users wait",
)
def name_warm_up(result: None, server_args: Any) -> None:
    """Register the warm-up and name it after the user's own (AFTER hook of `_handle_dspark`).

    Tokenizer workers are separate processes, in which this registration has no effect.
    """
    args = upstream.resolving_view(server_args)
    if args.skip_server_warmup or args.tokenizer_worker_num > 1:
        return
    upstream.register_warm_up(warm_up.NAME)(warm_up.answer_made_up)
    names = [name for name in (args.warmups, warm_up.NAME) if name]
    upstream.declare_resolution(server_args, "sglang_dspark.name_warm_up", warmups=",".join(names))
