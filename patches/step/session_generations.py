"""Start a new generation of the pool row with each turn of a streaming session.

A session keeps its request's pool row from turn to turn. This package identifies a request by its
row and the row's generation, for the counts of penalties and the request's speed. These end with a
turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seam


def advance_generation(original: Callable[[Any, Any], bool], sessions: Any, req: Any) -> bool:
    """AROUND hook of `try_cache_finished_req`: advance the generation of a kept row.

    The row of an aborted turn is freed, which advances its generation.
    """
    slot = sessions.borrowed_slot(req)
    if slot is None:
        return original(sessions, req)
    row = slot.kv.req_pool_idx
    kept = original(sessions, req)
    if kept:
        sessions.cache.req_to_token_pool.req_generation[row] += 1
    return kept


SEAMS = (
    Seam(
        name="session-generations",
        target="sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
        kind="around",
        hook=advance_generation,
        signature="(self, req)",
        why="a row that a session keeps would carry the last turn's penalty counts and speed",
    ),
)
