"""Keeps room for a speculative step at the end of the KV pool and of a request's row in its table.

The hooks: `sglang_dspark/serving/pool_end.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import pool_end

SEAMS = (
    Seam(
        name="pool-end",
        target="sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
        kind="after",
        hook=pool_end.keep_room,
        signature="(self, req)",
        why="an answer that reaches the end of the KV pool gets 500 where plain decoding ends it",
    ),
    Seam(
        name="row-end",
        target="sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len",
        kind="after",
        hook=pool_end.widen_row,
        signature="()",
        why="the slots of a long window at the context's end go to the next request's row",
    ),
)
