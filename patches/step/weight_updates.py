"""Keep a drafter's weights when the target's are updated, and renew copies of updated weights."""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seams, Upstream
from sglang_dspark.serving import upstream, weight_updates

SEAMS = Seams()


@SEAMS.subclass(
    "weight-updates",
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
    why="upstream loads the target's checkpoint into the drafter, which ends the server, and "
    "keeps stacked copies of the drafter's weights that an update leaves stale",
)
class WeightUpdater(Upstream):
    """Upstream's updater; a DSPARK drafter has its own checkpoint."""

    def _select_runners(self, selector: str = "all") -> weight_updates.Runners:
        """Select a drafter only by its name, `draft`; each update selects before it loads."""
        if selector == "all" and isinstance(self.draft_worker, upstream.DSparkWorkerV2):
            selector = "target"
        runners: weight_updates.Runners = super()._select_runners(selector)
        weight_updates.begin_update(runners)
        return runners

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        """Renew the rows of the target's LM head that a draft copied."""
        result = super().update_weights_from_disk(recv_req)
        weight_updates.renew_heads_of(self.draft_worker)  # a failed update may have written, too
        return result

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        """Renew the copied rows of the target's LM head, as `update_weights_from_disk`."""
        result = super().update_weights_from_ipc(recv_req)
        weight_updates.renew_heads_of(self.draft_worker)
        return result

    def end_weight_update(self, recv_req: Any) -> Any:
        """Renew copies of the drafter's weights: every update that can name it calls this last."""
        result, worker = super().end_weight_update(recv_req), self.draft_worker
        if result.success and isinstance(worker, upstream.DSparkWorkerV2) and worker._hosts_draft:
            weight_updates.renew_copies(worker.draft_model)
        return result
