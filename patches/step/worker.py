"""Run our decode step in a DSPARK worker: plan, draft or skip drafting, verify, learn from results.

Upstream: sglang/srt/speculative/dspark_components/dspark_worker_v2.py and dspark_planner.py, and
sglang/srt/managers/scheduler_components/batch_result_processor.py. Without a `StepState` on the
worker all of them run upstream's code; patches/cpu/step.py and patches/cuda/step.py put it there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seam
from sglang_dspark.step.state import state_of


def planner_of(original: Callable[[Any], Any], worker: Any) -> Any:
    """AROUND hook of `get_confidence_budget_prepare`: return the function that plans a step."""
    state = state_of(worker)
    if state is None:
        return original(worker)
    from sglang_dspark.step.plan import plan_ahead

    return lambda batch, future_map: plan_ahead(state, batch)


def forward_decode(
    original: Callable[..., Any],
    worker: Any,
    batch: Any,
    on_publish: Any,
    grammar_barrier: Any = None,
    coordination_plan: Any = None,
) -> Any:
    """AROUND hook of `_forward_decode`: run our step, or upstream's on a rank without requests."""
    state = state_of(worker)
    if state is None or batch.spec_info is None or batch.forward_mode.is_idle():
        return original(worker, batch, on_publish, grammar_barrier, coordination_plan)
    from sglang_dspark.step.decode import decode

    return decode(state, batch, on_publish, grammar_barrier)


def note_prefill(original: Callable[..., Any], worker: Any, batch: Any, *args: Any) -> Any:
    """AROUND hook of `_forward_prefill`: draw first tokens by the requests' seeds.

    The decode step before it gets no step time: it waited for the prefill.
    """
    state = state_of(worker)
    if state is None:
        return original(worker, batch, *args)
    from sglang_dspark.step.seeds import seeded_prefill

    state.engine.interrupted()
    with seeded_prefill(batch):
        return original(worker, batch, *args)


def process_decode(result: None, processor: Any, batch: Any, step: Any) -> None:
    """AFTER hook of `process_batch_result_decode`: learn from a step's results on the host."""
    state = state_of(processor.model_worker)
    if state is not None:
        from sglang_dspark.step.plan import learn

        learn(state, batch, step)


_WORKER = "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2"

SEAMS = (
    Seam(
        name="step-plan",
        target=f"{_WORKER}.get_confidence_budget_prepare",
        kind="around",
        hook=planner_of,
        signature="(self)",
        why="upstream finds K per rank, from a table that was measured by hand",
    ),
    Seam(
        name="step-decode",
        target=f"{_WORKER}._forward_decode",
        kind="around",
        hook=forward_decode,
        signature="(self, batch, on_publish, grammar_barrier=None, coordination_plan=None)",
        why="upstream drafts in every step, gamma deep, and admits by K and lengths of its own",
    ),
    Seam(
        name="step-prefill",
        target=f"{_WORKER}._forward_prefill",
        kind="around",
        hook=note_prefill,
        signature="(self, batch, on_publish, pp_proxy_tensors=None)",
        why="a decode step that waited for a prefill must not count as slow; first tokens have "
        "seeds too",
    ),
    Seam(
        name="step-result",
        target="sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor.process_batch_result_decode",
        kind="after",
        hook=process_decode,
        signature="(self, batch, result)",
        why="outcomes are learned when they are on the host anyway",
    ),
)
