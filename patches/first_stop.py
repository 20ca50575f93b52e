"""Ends an answer at the first stop of an accepted window.

The hook: `sglang_dspark/serving/first_stop.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import first_stop

SEAMS = (
    Seam(
        name="first-stop",
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        kind="around",
        hook=first_stop.end_at_the_first,
        signature="(self, new_accepted_len=1)",
        why="of two stops in one accepted window the later one may win, unlike in plain decoding",
    ),
)
