"""New weights in a running DSPARK server are the target's; the drafter keeps its own.

Upstream (0.5.23, sglang/srt/managers/scheduler_components/weight_updater.py) loads what an update
brings into every runner, the draft's too. MTP layers lie in the target's checkpoint; a DSpark
drafter has another one, whose layers have the names of the target's: they are overwritten, or
loading fails, and the scheduler with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Runners = list[tuple[str, Any]]


def select_runners(
    original: Callable[[Any, str], Runners], updater: Any, selector: str = "all"
) -> Runners:
    """AROUND hook of `_select_runners`; a drafter is updated by its name alone, `draft`."""
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

    if selector == "all" and isinstance(updater.draft_worker, DSparkWorkerV2):
        selector = "target"
    return original(updater, selector)
