"""Ends a turn of a streaming session where its keys and values end.

The hook: `sglang_dspark/serving/session_turns.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import session_turns

SEAMS = (
    Seam(
        name="session-turns",
        target="sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
        kind="around",
        hook=session_turns.end_turn,
        signature="(self, req)",
        why="without overlap the next turn of a server that speculates reads a slot never written",
    ),
)
