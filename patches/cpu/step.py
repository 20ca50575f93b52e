"""Disable upstream's relay of confidences on a CPU where our planner schedules.

Upstream: `decide_needs_confidence_relay` in sglang/srt/managers/overlap_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_dspark.patches.seam import Seams

SEAMS = Seams(device="cpu")


@SEAMS.around(
    "cpu-step-relay",
    "sglang.srt.managers.overlap_utils.decide_needs_confidence_relay",
    why="upstream would copy confidences in every step, which our planner does not read",
)
def needs_confidence_relay(original: Callable[[], bool]) -> bool:
    """Disable upstream's relay, as our planner has one, tagged with generations (AROUND hook)."""
    from sglang_dspark.serving import mode

    return original() and not mode.choice().ours
