"""Add our warm-up to the server's, unless the server starts without any.

Upstream: sglang/srt/entrypoints/http_server.py, `lifespan`, answers the requests of each warm-up
that `--warmups` names before HTTP is served. Ours: `sglang_dspark.serving.warm_up`.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream, warm_up

SEAMS = Seams(device="cuda")


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
