"""Keep slots without keys and values out of the next turn of a streaming session.

A session keeps its request's pool row and slots from turn to turn. Upstream
(sglang/srt/session/streaming_session.py, `try_cache_finished_req`) assumes that all tokens of a
finished turn are cached. The last one is not, unless the overlap loop has already launched the step
after it. Plain decoding has no slot for that token, which corrects the number. A step that
speculates has reserved slots, and the next turn would attend to their old content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import upstream


def end_turn(original: Callable[[Any, Any], bool], sessions: Any, req: Any) -> bool:
    """AROUND hook of `try_cache_finished_req`: count only the slots that were written."""
    slot = sessions.borrowed_slot(req)
    if slot is None:
        return original(sessions, req)
    written = slot.kv.kv_committed_len
    kept = original(sessions, req)
    if kept and _in_order():
        slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, written)
    return kept


def _in_order() -> bool:
    """Return whether a step ends before the next one is launched."""
    return bool(upstream.get_schedule().disable_overlap_schedule)


SEAMS = (
    Seam(
        name="session-turns",
        target="sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
        kind="around",
        hook=end_turn,
        signature="(self, req)",
        why="without overlap the next turn of a server that speculates reads a slot never written",
        issue="none found (2026-11-27)",
        drop_when="upstream excludes the last token of a turn from the cached ones without overlap",
    ),
)
