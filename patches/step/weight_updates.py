"""Keep a drafter's weights when the target's are updated, and renew copies of updated weights."""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import weight_updates

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

SEAMS = (
    Seam(
        name="weight-updates",
        target=f"{_UPDATER}._select_runners",
        kind="around",
        hook=weight_updates.select_runners,
        signature="(self, selector='all')",
        why="upstream loads the target's checkpoint into the drafter, which ends the server",
    ),
    Seam(
        name="drafter-weight-updates",
        target=f"{_UPDATER}.end_weight_update",
        kind="after",
        hook=weight_updates.end_update,
        signature="(self, recv_req)",
        why="upstream keeps stacked copies of the drafter's weights that an update leaves stale",
    ),
)
