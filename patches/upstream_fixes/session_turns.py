"""Keep slots without keys and values out of the next turn of a streaming session.

A session keeps its request's pool row and slots from turn to turn. Upstream
(sglang/srt/session/streaming_session.py, `try_cache_finished_req`) assumes that all tokens of a
finished turn are cached. The last one is not, unless the overlap loop has already launched the next
step. Plain decoding has no slot for that token, which corrects the number. A step that
speculates has reserved slots, and the next turn would attend to their old content.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seams, Upstream
from sglang_dspark.serving import upstream

SEAMS = Seams()


@SEAMS.subclass(
    "session-turns",
    "sglang.srt.session.streaming_session.StreamingSession",
    why="without overlap the next turn of a server that speculates reads a slot never written",
    issue="none found (2026-11-27)",
    drop_when="upstream excludes the last token of a turn from the cached ones without overlap",
)
class StreamingSession(Upstream):
    """Upstream's sessions, which count only the slots that were written."""

    def try_cache_finished_req(self, req: Any) -> bool:
        slot = self.borrowed_slot(req)
        written = None if slot is None else slot.kv.kv_committed_len
        kept: bool = super().try_cache_finished_req(req)
        # Without overlap a step ends before the next one is launched.
        if kept and written is not None and upstream.get_schedule().disable_overlap_schedule:
            slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, written)
        return kept
