"""Let an answer grow to the end of the KV pool, or of its row, as in plain decoding.

Upstream (sglang/srt/managers/scheduler.py, `init_req_max_new_tokens`) limits `max_new_tokens` to
the size of the pool. A step that speculates also reserves twice its window: a request alone in the
pool got 500 ("Out of memory even after retracting all other requests") near the limit.

A request's row in the table of slots is one window and four tokens longer than the context, where a
page has one token (sglang/srt/mem_cache/allocation_sizing.py). At the context's end a step reserves
two windows in it; on a CPU the excess would be written to the next row.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream

SEAMS = Seams()


@SEAMS.after(
    "pool-end",
    "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
    signature="(self, req)",
    why="an answer that reaches the end of the KV pool gets 500 where plain decoding ends it",
    issue="sgl-project/sglang#19881",
    drop_when="upstream limits max_new_tokens by the slots that a speculative step reserves",
)
def keep_room(result: Any, scheduler: Any, req: Any) -> None:
    """Keep the slots of one step free after the answer (AFTER hook of `init_req_max_new_tokens`).

    One token is always allowed: it is the prefill's, which needs no further slot.
    """
    if scheduler.spec_algorithm.is_none():
        return
    sampling = req.sampling_params
    # The pool allocates whole pages only.
    pool = scheduler.max_total_num_tokens // scheduler.page_size * scheduler.page_size
    room = pool - upstream.get_alloc_reserve_per_decode() - len(req.origin_input_ids)
    if scheduler.page_size > 1:
        room -= scheduler.page_size
    sampling.max_new_tokens = min(sampling.max_new_tokens, max(1, room))
    sampling.min_new_tokens = min(sampling.min_new_tokens, sampling.max_new_tokens)


@SEAMS.after(
    "row-end",
    "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len",
    why="the slots of a long window at the context's end go to the next request's row",
    issue="sgl-project/sglang#33581",
    drop_when="upstream sizes a row of req_to_token for the reserve of a step at page size 1",
)
def widen_row(extra: int) -> int:
    """Add slots for a step to the row (AFTER hook of `get_req_to_token_extra_context_len`)."""
    return max(extra, upstream.get_alloc_reserve_per_decode())
