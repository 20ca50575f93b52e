"""Puts the step on a DSPARK worker whose models are loaded and whose graphs are captured.

Upstream (0.5.23): sglang/srt/speculative/dspark_components/dspark_worker_v2.py. Where a worker
cannot be scheduled it verifies every draft, and the log says why: never a crash.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import torch

from sglang_dspark import __version__
from sglang_dspark.schedule.cost_table import ProfileKey
from sglang_dspark.serving.cuda.device import EventClock, GraphDevice
from sglang_dspark.serving.cuda.passes import GraphPasses
from sglang_dspark.serving.schedule import mode
from sglang_dspark.serving.schedule.attach import build, named, verify_everything
from sglang_dspark.serving.step.clock import Clock
from sglang_dspark.serving.step.state import STATE, StepState

logger = logging.getLogger(__name__)


def attach(worker: Any) -> None:
    """Profile, calibrate and take the worker's steps over, or say in one line why not."""
    if not worker._hosts_draft:
        return
    chosen = mode.choice()
    reason = chosen.reason if not chosen.ours else obstacle(worker)
    if reason is not None and (not chosen.ours or not worker._verify_planner.is_compact_mode):
        logger.info("sglang-dspark: mode %s (%s)", worker._verify_planner.mode_value, reason)
    elif reason is not None:
        verify_everything(worker)
        logger.warning("sglang-dspark: every draft is verified: %s", reason)
    else:
        take_over(worker, EventClock())


def take_over(worker: Any, clock: Clock) -> None:
    """Schedule this worker's steps, timed by `clock`."""
    device = GraphDevice(worker, clock)
    engine = build(worker, GraphPasses(worker, device), clock, _key(worker, device))
    worker.__dict__[STATE] = StepState(worker, engine, device)


def obstacle(worker: Any) -> str | None:
    """Why this worker cannot be scheduled; None: it can."""
    from sglang.srt.runtime_context import get_parallel

    runner, observers, parallel = worker.model_runner, worker._observers, get_parallel()
    epilogue = worker._verify_executor.verify_epilogue
    reasons = {
        "SGLang loaded the models for static verification": (
            not worker._verify_planner.is_compact_mode
        ),
        "several ranks would have to agree on lengths": (
            parallel.tp_size > 1 or parallel.attn_dp_enabled or parallel.pp_size > 1
        ),
        "SGLANG_SIMULATE_ACC_LEN is set": worker._simulated_correct_len is not None,
        "the target keeps a recurrent state": worker._need_mamba_verify_commit,
        "the target keeps a history of n-grams": (
            runner.ngram_embedding_manager.engram_hasher is not None
        ),
        "the drafter does not predict from its anchor": not worker.sample_from_anchor,
        "the drafter is built into the target (DeepSeek-V4)": worker._draft_is_moe,
        "SGLANG_DSPARK_DEFER_CONTEXT_KV is set": (
            epilogue is not None and epilogue.deferred_commit is not None
        ),
        "SGLANG_OPT_DSV41_DSPARK_PREPARE_INPUTS_ONCE is set": worker._prepare_inputs_once,
        "SGLang records every step for its own estimates": (
            observers._info_dumper.enabled or observers._block_accept_recorder is not None
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _key(worker: Any, device: GraphDevice) -> ProfileKey:
    """What the step times of this server depend on."""
    target, draft = worker.model_runner, worker.draft_model_runner
    tiers = f"graphs of up to {device.tiers[-1]} tokens" if device.tiers else "eager"
    return ProfileKey(
        model=named(str(target.model_config.model_path)),
        drafter=named(str(draft.model_config.model_path)),
        dtype=str(target.dtype),
        device=_device_name(str(worker.device)),
        parallel="tp1 pp1 dp1 ep1",
        backend=(
            f"{type(target.attn_backend).__name__}, {tiers}, compact, "
            f"{target.req_to_token_pool.req_to_token.shape[0]} seats"
        ),
        versions=f"sglang {version('sglang')}, torch {version('torch')}, ours {__version__}",
        gamma=int(worker.gamma),
    )


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    from sglang_dspark.common.machine import cpu_description

    return cpu_description()
