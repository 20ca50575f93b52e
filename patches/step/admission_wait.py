"""Bound the number of steps that a waiting request is held back while slots are free.

Upstream (sglang/srt/managers/min_free_slots_delayer.py) admits requests beside running ones only
once two to four slots are free, so that their prefills share a pass. It sets no limit: with seven
long answers on eight slots a request waited 6.6 s for the next one to end. Tensor-parallel ranks
decide alone and have to agree, so the limit is a number of rounds, not a time.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seams, Upstream

SEAMS = Seams()
MOST_ROUNDS = 50  # decode steps; 48 users with answers of 256 tokens free four slots in about ten


@SEAMS.subclass(
    "admission-wait",
    "sglang.srt.managers.min_free_slots_delayer.MinFreeSlotsDelayer",
    why="upstream holds a request back without a limit while a slot is free",
)
class MinFreeSlotsDelayer(Upstream):
    """Upstream's delayer, with a limit. dspark_held: rounds in which it held requests back."""

    dspark_held: int = 0

    def should_delay(self, *, running_bs: int, num_allocatable_reqs: int) -> bool:
        """Delay admission for at most MOST_ROUNDS in a row.

        Upstream asks in every round of its loop in which a request waits, the same on all ranks.
        """
        free = num_allocatable_reqs
        if not super().should_delay(running_bs=running_bs, num_allocatable_reqs=free):
            self.dspark_held = 0
            return False
        if free <= 0:  # nothing could be admitted
            return True
        held = self.dspark_held
        self.dspark_held = 0 if held == MOST_ROUNDS else held + 1
        return held < MOST_ROUNDS
