"""Bound the number of steps that a waiting request is held back while slots are free.

Upstream (sglang/srt/managers/min_free_slots_delayer.py) admits requests beside running ones only
once two to four slots are free, so that their prefills share a pass. It sets no limit: with seven
long answers on eight slots a request waited 6.6 s for the next one to end. Tensor-parallel ranks
decide alone and have to agree, so the limit is a number of rounds, not a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seams

SEAMS = Seams()
MOST_ROUNDS = 50  # decode steps; 48 users with answers of 256 tokens free four slots in about ten
_HELD = "dspark_held"  # attribute of the delayer: rounds in which it held requests back


@SEAMS.around(
    "admission-wait",
    "sglang.srt.managers.min_free_slots_delayer.MinFreeSlotsDelayer.should_delay",
    signature="(self, *, running_bs, num_allocatable_reqs)",
    why="upstream holds a request back without a limit while a slot is free",
)
def should_delay(
    original: Callable[..., bool], delayer: Any, *, running_bs: int, num_allocatable_reqs: int
) -> bool:
    """Delay admission for at most MOST_ROUNDS in a row (AROUND hook of `should_delay`).

    Upstream asks in every round of its loop in which a request waits, the same on all ranks.
    """
    if not original(delayer, running_bs=running_bs, num_allocatable_reqs=num_allocatable_reqs):
        delayer.__dict__.pop(_HELD, None)
        return False
    if num_allocatable_reqs <= 0:  # nothing could be admitted
        return True
    held = delayer.__dict__.get(_HELD, 0)
    delayer.__dict__[_HELD] = 0 if held == MOST_ROUNDS else held + 1
    return bool(held < MOST_ROUNDS)
