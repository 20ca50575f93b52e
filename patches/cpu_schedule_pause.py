"""A decode step of a pause takes a short way through DSPARK's worker, and what steps deliver.

Upstream (0.5.23): sglang/srt/speculative/dspark_components/dspark_worker_v2.py, `_forward_decode`,
and sglang/srt/managers/scheduler_components/batch_result_processor.py.
Planning comes first here; a step that drafts, or that asks for more than tokens, goes upstream's
way with the plan it has got already (`cpu_schedule_step.propose`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.cpu_lean_pass import verify_pass
from sglang_dspark.patches.cpu_schedule_step import rest
from sglang_dspark.patches.seam import Seam


def forward_decode(
    original: Callable[..., Any],
    worker: Any,
    batch: Any,
    on_publish: Any,
    grammar_barrier: Any = None,
    coordination_plan: Any = None,
) -> Any:
    """AROUND hook of `DSparkWorkerV2._forward_decode`."""
    from sglang_dspark.serving.schedule import pause
    from sglang_dspark.serving.schedule.attach import engine_of

    engine = engine_of(worker)
    if engine is not None and worker.__dict__.get(pause.FITS) and pause.takes(batch):
        pool = worker.model_runner.req_to_token_pool
        plan = engine.begin(batch.req_pool_indices, pool.req_generation, batch.seq_lens).plan
        if not plan.speculates:
            rest(worker._kv_injector, batch)
            return pause.run(worker, engine, batch, on_publish, verify_pass)
    return original(worker, batch, on_publish, grammar_barrier, coordination_plan)


def process_decode(result: None, processor: Any, batch: Any, step: Any) -> None:
    """AFTER hook: which of a decode step's tokens reached anybody."""
    if not batch.spec_algorithm.is_dspark():
        return
    from sglang_dspark.serving.schedule.attach import engine_of

    engine, accepted = engine_of(processor.model_worker), step.num_correct_drafts_per_req_cpu
    if engine is not None and accepted is not None:
        verified = step.num_cap_tokens if step.cap_lens is not None else None  # None: every draft
        engine.processed(batch.reqs, accepted, verified is None or verified > len(accepted))


SEAMS = (
    Seam(
        name="cpu-schedule-pause",
        target="sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2."
        "_forward_decode",
        kind="around",
        hook=forward_decode,
        signature="(self, batch, on_publish, grammar_barrier=None, coordination_plan=None)",
        why="a step without drafts cost 2 ms more than the plain server's",
        device="cpu",
    ),
    Seam(
        name="cpu-schedule-delivered",
        target="sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor.process_batch_result_decode",
        kind="after",
        hook=process_decode,
        signature="(self, batch, result)",
        why="tokens behind an answer's end count for a step's gain although nobody gets them",
        device="cpu",
    ),
)
