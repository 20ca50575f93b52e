"""Puts the step on a DSPARK worker of a CPU once its models and pools are ready.

Upstream: sglang/srt/speculative/dspark_components/dspark_worker_v2.py. Where a worker
cannot be scheduled it verifies every draft, and the log says why: never a crash.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang_dspark.common.machine import cpu_description
from sglang_dspark.schedule.cost_table import ProfileKey
from sglang_dspark.serving import upstream
from sglang_dspark.serving.broken_weights import refuse_broken
from sglang_dspark.serving.config import current_config
from sglang_dspark.serving.cpu import linear, packed_weights
from sglang_dspark.serving.cpu.device import HostDevice
from sglang_dspark.serving.cpu.narrow_matmul import REVISION
from sglang_dspark.serving.cpu.passes import Passes
from sglang_dspark.serving.cpu.short_passes import verify_pass
from sglang_dspark.serving.schedule import mode
from sglang_dspark.serving.schedule.build import build, obstacle, profile_key, verify_everything
from sglang_dspark.serving.schedule.ranks import engine_for
from sglang_dspark.serving.step.clock import HostClock
from sglang_dspark.serving.step.ranks import ranks_of
from sglang_dspark.serving.step.state import STATE, StepState

logger = logging.getLogger(__name__)


def attach(worker: Any) -> None:
    """Profile, calibrate and take over, or say in one line why not."""
    refuse_broken(worker)
    chosen = mode.choice()
    if not chosen.ours:
        logger.info("sglang-dspark: mode %s (%s)", worker._verify_planner.mode_value, chosen.reason)
        return
    reason = _obstacle(worker)
    if reason is not None:
        verify_everything(worker)
        logger.warning("sglang-dspark: every draft is verified: %s", reason)
        return
    _take_over(worker)


def _obstacle(worker: Any) -> str | None:
    """Why this worker cannot be scheduled here."""
    from sglang_dspark.serving.cpu.attention import DsparkCpuAttnBackend

    runner = worker.model_runner
    if not isinstance(runner.attn_backend, DsparkCpuAttnBackend):
        return f"{type(runner.attn_backend).__name__} has no windows of unlike lengths here"
    if upstream.get_parallel().attn_dp_enabled:
        return "ranks of data-parallel attention would have to agree on a tier"
    return obstacle(worker)


def _take_over(worker: Any) -> None:
    proposers, read, ranks = _proposers(worker), _seconds(), ranks_of(worker)
    clock, key = HostClock(read), _key(worker)
    engine = engine_for(
        ranks, Passes(worker, proposers, read), lambda passes: build(worker, passes, clock, key)
    )
    device = HostDevice(worker, clock, verify_pass)
    worker.__dict__[STATE] = StepState(worker, engine, device, proposers, ranks)


def _seconds() -> Callable[[], float]:
    """With one compute thread its CPU time: what neighbours take is no cost of a choice.

    Ranks wait for each other, which takes no CPU time.
    """
    from sglang_dspark.serving.cpu.threads import chosen_threads

    alone = chosen_threads() == 1 and upstream.get_parallel().tp_size == 1
    return time.thread_time if alone else time.perf_counter


def _proposers(worker: Any) -> dict[int, Any]:
    """A proposer for each depth 1 .. gamma; they share the model and the noise."""
    whole = worker._proposer
    proposers = {int(worker.gamma): whole}
    for depth in range(1, int(worker.gamma)):
        shallow = upstream.DraftBlockProposer(
            draft_model=worker.draft_model,
            draft_model_runner=worker.draft_model_runner,
            gamma=depth,
            mask_token_id=worker._mask_token_id,
            draft_block_spec_info=upstream.make_draft_block_spec_info(
                draft_token_num=depth, device=worker.device
            ),
            tp_sync=worker._tp_sync,
            random_seed=worker.target_worker.random_seed,
            greedy_draft=worker._greedy_draft,
        )
        # Two counters over one key would draw the same noise twice.
        shallow._noise = whole._noise
        proposers[depth] = shallow
    return proposers


def _key(worker: Any) -> ProfileKey:
    from sglang_dspark.serving.cpu.threads import chosen_threads

    return profile_key(
        worker,
        device=f"{cpu_description()}; {chosen_threads()} compute threads",
        backend=_backend(worker.target_worker.model_runner.model, worker.draft_model),
    )


def _backend(*models: Any) -> str:
    """What runs the passes of target and draft, and how their weights are kept."""
    forms = [packed_weights.form_in(each) for each in models]
    kept = "/".join(f"{form.name} x {linear.activations_beside(form)}" for form in forms)
    kernel = f"matrix kernel {REVISION}" if current_config().cpu.matrix_kernel else "BLAS"
    return f"eager, compact, context in batches, {kernel}, weights {kept}"
