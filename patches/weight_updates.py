"""Keeps a drafter's weights where a running server takes new ones.

The hook: `sglang_dspark/serving/weight_updates.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import weight_updates

SEAMS = (
    Seam(
        name="weight-updates",
        target=(
            "sglang.srt.managers.scheduler_components.weight_updater"
            ".SchedulerWeightUpdaterManager._select_runners"
        ),
        kind="around",
        hook=weight_updates.select_runners,
        signature="(self, selector='all')",
        why="upstream loads the target's checkpoint into the drafter, which ends the server",
    ),
)
