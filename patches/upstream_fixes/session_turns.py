"""Turns of a streaming session: none stands on a slot without keys and values, each is a tenant.

A session keeps its request's pool row and slots from turn to turn. Upstream
(sglang/srt/session/streaming_session.py, `try_cache_finished_req`) takes all tokens of a finished
turn as cached. The last one is not, unless the overlap loop has launched a step behind it already:
plain decoding has no slot for it, which sets the number right, but a step that speculates has
reserved some, and the next turn would attend to whatever lies there.

What this package knows of a request by its row and the row's generation, counts for penalties and
its speed, ends with a turn: the generation goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import upstream


def end_turn(original: Callable[[Any, Any], bool], sessions: Any, req: Any) -> bool:
    """AROUND hook of `StreamingSession.try_cache_finished_req`."""
    slot = sessions.borrowed_slot(req)
    if slot is None:
        return original(sessions, req)
    written, row = slot.kv.kv_committed_len, slot.kv.req_pool_idx
    kept = original(sessions, req)
    if kept:
        if _in_order():
            slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, written)
        sessions.cache.req_to_token_pool.req_generation[row] += 1
    return kept


def _in_order() -> bool:
    """Whether a step ends before the next one is launched."""
    return bool(upstream.get_schedule().disable_overlap_schedule)


SEAMS = (
    Seam(
        name="session-turns",
        target="sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
        kind="around",
        hook=end_turn,
        signature="(self, req)",
        why="without overlap the next turn of a server that speculates reads a slot never written",
    ),
)
