"""Run our decode step in a DSPARK worker: plan, draft or skip drafting, verify, learn from results.

Upstream: sglang/srt/speculative/dspark_components/dspark_worker_v2.py and dspark_planner.py, and
sglang/srt/managers/scheduler_components/batch_result_processor.py. Without a `StepState` a worker
runs upstream's step.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seams, Upstream
from sglang_dspark.serving.startup import active_device
from sglang_dspark.step import decode, plan
from sglang_dspark.step.seeds import seeded_prefill
from sglang_dspark.step.state import StepState, state_of

SEAMS = Seams()


@SEAMS.subclass(
    "step-worker",
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2",
    why="upstream drafts in every step, gamma deep, and finds K per rank, from a table that "
    "was measured by hand",
)
class DSparkWorker(Upstream):
    """Upstream's worker with our step. dspark_step: set before the first request, if it is ours."""

    dspark_step: StepState | None = None

    def init_cuda_graphs(self) -> None:
        """Capture a draft if a graph supports it; then attach our step to the ready worker.

        Capturing grouped products that read the host would end the server. On a GPU the draft's
        heads are reduced to the tokens that can be drafted, before the capture.
        """
        if self._hosts_draft:
            self._decode_graph_allowed &= getattr(self.draft_model, "capturable", True)
        device = active_device()
        if device == "cuda":
            from sglang_dspark.backends.cuda.chain_context import attach as attach_chain
            from sglang_dspark.backends.cuda.reduced_vocabulary import reduce

            attach_chain(self)
            reduce(self)
        super().init_cuda_graphs()
        if device == "cpu":
            from sglang_dspark.backends.cpu.attach import attach

            self.dspark_step = attach(self)
        elif device == "cuda":
            from sglang_dspark.backends.cuda.attach import attach as attach_if_supported

            self.dspark_step = attach_if_supported(self)

    def get_confidence_budget_prepare(self) -> Any:
        """Return the function that plans a step before its launch; None: `take_plan` plans it."""
        state = self.dspark_step
        if state is None:
            return super().get_confidence_budget_prepare()
        if active_device() == "cpu":
            return None
        return lambda batch, future_map: plan.plan_ahead(state, batch)

    def _forward_decode(
        self,
        batch: Any,
        on_publish: Any,
        grammar_barrier: Any = None,
        coordination_plan: Any = None,
    ) -> Any:
        """Run our step, or upstream's on a rank without requests.

        Upstream's `forward_batch_generation` calls it for every batch that does not prefill.
        """
        state = self.dspark_step
        if state is None or batch.spec_info is None or batch.forward_mode.is_idle():
            return super()._forward_decode(batch, on_publish, grammar_barrier, coordination_plan)
        return decode.decode(state, batch, on_publish, grammar_barrier)

    def _forward_prefill(self, batch: Any, on_publish: Any, pp_proxy_tensors: Any = None) -> Any:
        """Draw first tokens by the requests' seeds.

        The preceding decode step gets no step time: it waited for the prefill.
        """
        state = self.dspark_step
        if state is None:
            return super()._forward_prefill(batch, on_publish, pp_proxy_tensors)
        state.prefills(batch)
        with seeded_prefill(batch):
            return super()._forward_prefill(batch, on_publish, pp_proxy_tensors)


@SEAMS.after(
    "step-result",
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor.process_batch_result_decode",
    signature="(self, batch, result)",
    why="outcomes are learned when they are on the host anyway",
)
def process_decode(result: None, processor: Any, batch: Any, step: Any) -> None:
    """Learn from a step's results on the host (AFTER hook of `process_batch_result_decode`)."""
    state = state_of(processor.model_worker)
    if state is not None:
        plan.learn(state, batch, step)
