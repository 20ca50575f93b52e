"""An answer that grows to the end of the KV pool, or of its row, is as long as plain decoding's.

Upstream (sglang/srt/managers/scheduler.py, `init_req_max_new_tokens`) cuts `max_new_tokens`
to what the pool holds. A step of a server that speculates needs room for twice its window besides;
so a request that is alone in the pool, and near its end, was ended with status 500 ("Out of memory
even after retracting all other requests") where plain decoding would have reached its limit.

A request's row in the table of slots is as long as the context and some: one window and four
tokens, where a page has one token (sglang/srt/mem_cache/allocation_sizing.py). Two windows are
reserved in it at the context's end, of which a CPU would write what is over to the next row.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import upstream


def keep_room(result: Any, scheduler: Any, req: Any) -> None:
    """AFTER hook of `init_req_max_new_tokens`: leave the room of a step behind the answer.

    One token there is always: it comes from the prefill, which needs none.
    """
    if scheduler.spec_algorithm.is_none():
        return
    sampling = req.sampling_params
    # Whole pages alone are given out.
    pool = scheduler.max_total_num_tokens // scheduler.page_size * scheduler.page_size
    room = pool - upstream.get_alloc_reserve_per_decode() - len(req.origin_input_ids)
    if scheduler.page_size > 1:
        room -= scheduler.page_size
    sampling.max_new_tokens = min(sampling.max_new_tokens, max(1, room))
    sampling.min_new_tokens = min(sampling.min_new_tokens, sampling.max_new_tokens)


def widen_row(extra: int) -> int:
    """AFTER hook of `get_req_to_token_extra_context_len`: room for a step behind the context."""
    return max(extra, upstream.get_alloc_reserve_per_decode())


SEAMS = (
    Seam(
        name="pool-end",
        target="sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
        kind="after",
        hook=keep_room,
        signature="(self, req)",
        why="an answer that reaches the end of the KV pool gets 500 where plain decoding ends it",
    ),
    Seam(
        name="row-end",
        target="sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len",
        kind="after",
        hook=widen_row,
        signature="()",
        why="the slots of a long window at the context's end go to the next request's row",
    ),
)
