"""Bound the time that a waiting request is held back while slots are free.

Upstream (sglang/srt/managers/min_free_slots_delayer.py) admits requests beside running ones only
once two to four slots are free, so that their prefills share a pass. It sets no limit of time: with
seven long answers on eight slots a request waited 6.6 s for the next one to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seams

SEAMS = Seams()
LONGEST_S = 1.0  # a busy server frees four of 48 slots sooner, and shares prefills as upstream's
_SINCE = "dspark_since"  # attribute of the delayer: when it first held the waiting requests back


@SEAMS.around(
    "admission-wait",
    "sglang.srt.managers.min_free_slots_delayer.MinFreeSlotsDelayer.should_delay",
    signature="(self, *, running_bs, num_allocatable_reqs)",
    why="upstream holds a request back without a limit of time while a slot is free",
)
def should_delay(
    original: Callable[..., bool], delayer: Any, *, running_bs: int, num_allocatable_reqs: int
) -> bool:
    """Delay admission for at most LONGEST_S at a time (AROUND hook of `should_delay`).

    Upstream asks in every round of its loop in which a request waits.
    """
    now = time.monotonic()
    if not original(delayer, running_bs=running_bs, num_allocatable_reqs=num_allocatable_reqs):
        delayer.__dict__.pop(_SINCE, None)
        return False
    if num_allocatable_reqs <= 0:  # nothing could be admitted
        return True
    held = now - delayer.__dict__.setdefault(_SINCE, now)
    if held <= LONGEST_S:
        return True
    del delayer.__dict__[_SINCE]
    return False
