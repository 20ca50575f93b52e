"""Attach the step to a DSPARK worker whose models are loaded and whose graphs are captured.

Upstream: sglang/srt/speculative/dspark_components/dspark_worker_v2.py. A worker that cannot be
scheduled verifies every draft, and logs the reason.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch

from sglang_dspark.backends.cuda import graph_epilogue
from sglang_dspark.backends.cuda.chain_context import context_of
from sglang_dspark.backends.cuda.compilations import watch
from sglang_dspark.backends.cuda.device import EventClock, GraphDevice
from sglang_dspark.backends.cuda.passes import GraphPasses
from sglang_dspark.schedule.cost_table import ProfileKey
from sglang_dspark.serving import mode, startup, upstream
from sglang_dspark.serving.profile import Passes
from sglang_dspark.step.build import build, obstacle, profile_key, refuse_broken, verify_everything
from sglang_dspark.step.engine import ScheduleEngine
from sglang_dspark.step.engine_protocol import Engine
from sglang_dspark.step.ranks import engine_for, ranks_of
from sglang_dspark.step.state import StepState
from sglang_dspark.step.timing import Clock

logger = logging.getLogger(__name__)


def attach(worker: Any) -> StepState | None:
    """Profile, calibrate and return the state of our step; None, logged, where it cannot run.

    Ends the server for a chain drafter where it cannot run.
    """
    if not worker._hosts_draft:
        return None
    refuse_broken(worker)
    chosen = mode.choice()
    reason = chosen.reason if not chosen.ours else _obstacle(worker)
    if reason is not None and context_of(worker) is not None:
        startup.stop(
            f"a drafter that runs once a token is served only where drafts are scheduled: {reason}"
        )
    if reason is not None and (not chosen.ours or not worker._verify_planner.is_compact_mode):
        logger.info("sglang-dspark: mode %s (%s)", worker._verify_planner.mode_value, reason)
    elif reason is not None:
        verify_everything(worker)
        graph_epilogue.detach(worker._verify_executor)
        logger.warning("sglang-dspark: every draft is verified: %s", reason)
    else:
        return take_over(worker, EventClock())
    return None


def take_over(worker: Any, clock: Clock) -> StepState:
    """Return the state that schedules this worker's steps, timed by `clock`."""
    use_blockwise_rejection(worker)
    device, ranks = GraphDevice(worker, clock), ranks_of(worker)
    key = _key(worker, device)

    def built(passes: Passes) -> ScheduleEngine:
        passes.warm_up()  # with saved step times nothing else runs before a request
        return build(worker, passes, clock, key)

    engine = engine_for(ranks, GraphPasses(worker, device), built)
    _free_cached(worker)
    state = StepState(
        worker, engine, device, ranks, end_warm_up=partial(_count_compilations, engine)
    )
    runner = worker.model_runner
    slots = int(runner.req_to_token_pool.req_to_token.shape[0]) - 1  # row 0 is padding
    width = int(runner.model_config.vocab_size)
    state.counts.reserve(slots, width, torch.device(worker.device))
    return state


def _count_compilations(engine: Engine) -> None:
    """Count kernels that compile from now on; with several ranks only the leader counts."""
    if isinstance(engine, ScheduleEngine):
        watch(engine.metrics.kernel_compiled)


def _free_cached(worker: Any) -> None:
    """Release blocks cached by the profile's eager passes: they ran on the default stream, and the
    allocator does not reuse those blocks on the stream that serves requests."""
    if torch.device(worker.device).type == "cuda":
        torch.cuda.empty_cache()


def use_blockwise_rejection(worker: Any) -> None:
    """Let SGLang judge uncut sampled steps by its `BlockwiseRejection`, as its environment variable
    SGLANG_OPT_DSV41_BLOCKWISE_REJECTION does.

    The rule is the same, drafts one by one; several programs read a row, and no probabilities
    are written (sglang/kernels/ops/speculative/dspark/blockwise_rejection.py). Upstream makes the
    noise in the worker's constructor, from the server's seed, only for CUDA.
    """
    executor = worker._verify_executor
    if torch.device(worker.device).type != "cuda" or executor._rejection_noise is not None:
        return
    noise = upstream.make_rejection_noise(worker.target_worker.random_seed, worker.device)
    worker._rejection_noise = executor._rejection_noise = noise


def _obstacle(worker: Any) -> str | None:
    """Return the reason why this worker cannot be scheduled on an accelerator; None if it can."""
    parallel, runner = upstream.get_parallel(), worker.model_runner
    if not worker._verify_planner.is_compact_mode:
        return "SGLang loaded the models for static verification"
    if parallel.attn_dp_enabled:
        return "ranks of data-parallel attention would have to agree on a tier"
    if parallel.pp_size > 1:
        return "SGLang verifies on the last of several stages"
    if getattr(runner.token_to_kv_pool, "post_capture_active", False):
        return "the cache has no memory yet (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING)"
    draft = worker.draft_model_runner
    if draft.attn_backend.needs_cpu_seq_lens and not runner.attn_backend.needs_cpu_seq_lens:
        return (
            f"the draft's attention ({type(draft.attn_backend).__name__}) waits for lengths on the "
            "host in every step, the target's does not; give the draft the target's by "
            "--speculative-draft-attention-backend"
        )
    if worker.draft_model.confidence_head is None and worker._greedy_draft:
        return (
            "the drafter has no confidence head, and greedy drafts (SGLANG_DSPARK_USE_GREEDY_DRAFT)"
            " keep no probabilities to estimate confidence from"
        )
    if worker._kv_injector.swa_ring_size is not None:  # the profile's rows name no request
        return "the draft's cache is a ring of each request (--enable-encoder-swa-bounded-replay)"
    return obstacle(worker)


def _key(worker: Any, device: GraphDevice) -> ProfileKey:
    tiers = f"graphs of up to {device.tiers[-1]} tokens" if device.tiers else "eager"
    return profile_key(worker, _device_name(str(worker.device)), f"{tiers}, compact")


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    from sglang_dspark.common.machine import cpu_description

    return cpu_description()
