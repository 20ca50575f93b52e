"""Start a new generation of the pool row with each turn of a streaming session.

A session keeps its request's pool row from turn to turn. This package identifies a request by its
row and the row's generation, for its penalty counts and its speed. Both end with a
turn.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seams, Upstream

SEAMS = Seams()


@SEAMS.subclass(
    "session-generations",
    "sglang.srt.session.streaming_session.StreamingSession",
    why="a row that a session keeps would carry the last turn's penalty counts and speed",
)
class StreamingSession(Upstream):
    """Upstream's sessions, which advance the generation of a row that they keep.

    The row of an aborted turn is freed, which advances its generation.
    """

    def try_cache_finished_req(self, req: Any) -> bool:
        slot = self.borrowed_slot(req)
        row = None if slot is None else slot.kv.req_pool_idx
        kept: bool = super().try_cache_finished_req(req)
        if kept and row is not None:
            self.cache.req_to_token_pool.req_generation[row] += 1
        return kept
