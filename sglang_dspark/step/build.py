"""Build the `ScheduleEngine` of a DSPARK worker whose models and pools are ready.

Upstream: sglang/srt/speculative/dspark_components/dspark_worker_v2.py. backends/cpu/attach.py and
backends/cuda/attach.py attach the engine to the worker.
"""

from __future__ import annotations

import hashlib
import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sglang_dspark import __version__
from sglang_dspark.drafter.weight_files import is_finite
from sglang_dspark.errors import DSparkError
from sglang_dspark.models.identity import target_sha256
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.cost_table import ProfileKey
from sglang_dspark.schedule.early_stop import EarlyStopPlanner
from sglang_dspark.schedule.first_drafts import FirstDrafts
from sglang_dspark.schedule.guard import SERVING_GUARD
from sglang_dspark.schedule.guarded import SearchPlanner
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.plan import PlannerConfig, Signal
from sglang_dspark.schedule.planner_protocol import Planner
from sglang_dspark.schedule.rehearsal import rehearse, uncalibrated
from sglang_dspark.schedule.static_threshold import ThresholdPlanner
from sglang_dspark.schedule.sts_file import FILE_NAME, read_sts
from sglang_dspark.serving import profile, startup, upstream
from sglang_dspark.serving.config import current_config
from sglang_dspark.serving.fallbacks import Fallback
from sglang_dspark.serving.metrics import Collector, StepMetrics
from sglang_dspark.serving.speed_targets import SpeedTargets
from sglang_dspark.serving.step_log import StepLog
from sglang_dspark.step.drafter_fit import DrafterFit
from sglang_dspark.step.engine import ScheduleEngine
from sglang_dspark.step.timing import Clock

logger = logging.getLogger(__name__)

_CHECKED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # not packed formats


def obstacle(worker: Any) -> str | None:
    """Return the reason why we cannot run this worker's steps on any device, or None."""
    runner, observers = worker.model_runner, worker._observers
    epilogue = worker._verify_executor.verify_epilogue
    reasons = {
        "SGLANG_SIMULATE_ACC_LEN is set": worker._simulated_correct_len is not None,
        "its recurrent layers take windows of one length": (
            worker._need_mamba_verify_commit
            and not runner.attn_backend.linear_attn_backend.supports_ragged_verify_graph
        ),
        "the target keeps a history of n-grams": (
            runner.ngram_embedding_manager.engram_hasher is not None
        ),
        "SGLANG_DSPARK_DEFER_CONTEXT_KV is set": (
            epilogue is not None and epilogue.deferred_commit is not None
        ),
        "SGLANG_OPT_DSV41_DSPARK_PREPARE_INPUTS_ONCE is set": worker._prepare_inputs_once,
        "SGLang records every step for its own estimates": (
            observers._info_dumper.enabled or observers._block_accept_recorder is not None
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def refuse_broken(worker: Any) -> None:
    """End the server with one line if the drafter has a weight with NaN or infinite values.

    Such a drafter is slow and still correct, as its drafts are rejected. Upstream loads it without
    a warning.
    """
    found = broken_weight(worker.draft_model, worker.target_worker.model_runner.model)
    if found is not None:
        path = worker.draft_model_runner.model_config.model_path
        startup.stop(
            f"drafter {path}: the weight {found} holds NaN or infinite values; export "
            "or fetch the drafter again, or with --dtype float16 try --dtype float32"
        )


def broken_weight(drafter: nn.Module, target: nn.Module) -> str | None:
    """Return the name of the drafter's first weight with NaN or infinite values, or None.

    Weights shared with the target are not checked.
    """
    shared = {weight.data_ptr() for weight in target.parameters()}
    for name, weight in drafter.named_parameters():
        own = weight.dtype in _CHECKED and weight.data_ptr() not in shared
        if own and not is_finite(weight.detach()):
            return name
    return None


def verify_everything(worker: Any) -> None:
    """Verify every draft in every step, in any mode in which the models were loaded.

    Graphs captured for variable-length windows support no other layout. With such graphs upstream's
    rule for a planner without costs gives all windows one length.
    """
    planner = worker._verify_planner
    planner._budget_planner, planner._is_verify_all = None, True
    if worker.model_runner.decode_cuda_graph_runner is None:
        planner._ragged_verify_mode = upstream.RaggedVerifyMode.STATIC


def build(worker: Any, passes: profile.Passes, clock: Clock, key: ProfileKey) -> ScheduleEngine:
    """Profile, calibrate and compile the scheduler of a worker; log one line.

    passes: of the worker's models, on its device. clock: times its steps.
    """
    gamma = int(worker.gamma)
    chosen = current_config().schedule
    profiled = profile.table_for(key, passes, chosen.profile_seconds, _log)
    signal = _signal(worker)
    pool_rows = int(worker.model_runner.req_to_token_pool.req_to_token.shape[0])
    calibration, calibrated, refused = _calibration(worker, gamma, pool_rows)
    config = PlannerConfig(lag=_lag(), signal=signal, guard=SERVING_GUARD)
    rehearse(_planner(gamma, CostModel(profiled.table, pool_rows), config), calibration)
    planner = _planner(gamma, CostModel(profiled.table, pool_rows), config)
    log = None if chosen.step_log is None else StepLog(Path(chosen.step_log).expanduser())
    metrics = StepMetrics(planner, calibration, _collector(), log)
    headless = () if signal == "confidence" else (Fallback.NO_HEAD,)
    for fallback in (*profiled.fallbacks, *refused, *headless):
        metrics.count_fallback(fallback)
    speeds = SpeedTargets(pool_rows, chosen.speed_target)
    logger.info(
        "sglang-dspark: mode compact, scheduled by %s; step times of 1 to %d tokens and drafts of "
        "1 to %d positions %s; %s",
        planner.describe(), profiled.table.knots[-1], planner.gamma, profiled.source, calibrated,
    )  # fmt: skip
    fit = DrafterFit(FirstDrafts(pool_rows, chosen.min_acceptance), metrics, planner.renew)
    return ScheduleEngine(planner, calibration, metrics, clock, fit, speeds, chosen.fairness_floor)


def _signal(worker: Any) -> Signal:
    """Return the signal that admits this worker's drafts; log one line if it has no head."""
    if worker.draft_model.confidence_head is not None:
        return "confidence"
    _log(
        "the drafter has no confidence head (enable_confidence_head): confidence is estimated from "
        "the largest probability of each draft position"
    )
    return "draft probability"


def _lag() -> int:
    """Return the steps between a confidence and the plan that reads it.

    With overlap a step is planned before the result of the previous one is on the host.
    """
    return 1 if upstream.get_schedule().disable_overlap_schedule else 2


def _planner(gamma: int, costs: CostModel, config: PlannerConfig) -> Planner:
    """Make the planner that the configuration names, with nothing learned."""
    chosen = current_config().schedule
    if chosen.threshold is not None:
        return ThresholdPlanner(chosen.threshold, gamma, costs.max_requests, costs, config)
    if chosen.algorithm == "early-stop":
        return EarlyStopPlanner(gamma, costs.max_requests, costs, config)
    return SearchPlanner(gamma, costs.max_requests, costs, config)


def _log(line: str) -> None:
    logger.info("sglang-dspark: %s", line)


def _calibration(
    worker: Any, gamma: int, pool_rows: int
) -> tuple[OnlineCalibration, str, tuple[Fallback, ...]]:
    """Return the calibration, by the drafter's table if any, a phrase to log, and fallbacks."""
    identity = uncalibrated(gamma, pool_rows)
    folder = Path(str(worker.draft_model_runner.model_config.model_path))
    path = folder / FILE_NAME
    if not path.is_file():
        return identity, "no sts.json: confidence is calibrated online", ()
    try:
        sts = read_sts(path, drafter_sha256=target_sha256(folder), gamma=gamma)
    except DSparkError as error:
        logger.warning("sglang-dspark: %s; confidence is calibrated online", error)
        return identity, "sts.json not used", (Fallback.STS_REFUSED,)
    tables = [sts.table(temperature).followed for temperature in (0.0, 1.0)]
    calibration = OnlineCalibration(tables, pool_rows=pool_rows)
    return calibration, f"calibrated by {path} and online", ()


def _collector() -> Collector | None:
    """Return a collector of metrics if SGLang exports its own."""
    if not upstream.get_observability().enable_metrics:
        return None
    parallel = upstream.get_parallel()
    labels = {"model_name": upstream.get_serving().served_model_name, "tp_rank": parallel.tp_rank}
    if parallel.dp_rank is not None:  # as in SGLang's own labels: one of several replicas
        labels["dp_rank"] = parallel.dp_rank
    return Collector({name: str(value) for name, value in labels.items()})


def profile_key(worker: Any, device: str, backend: str) -> ProfileKey:
    """Return the key of this server's step times.

    device: its name and the part of it that computes. backend: the code that runs the passes.
    """
    target, draft = worker.model_runner, worker.draft_model_runner
    parallel = upstream.get_parallel()
    slots = target.req_to_token_pool.req_to_token.shape[0]
    cache = target.kv_cache_dtype
    kept = "" if cache == target.dtype else f", {cache} cache"
    if quantised := target.model_config.quantization:
        kept += f", {quantised}"
    if overrides := target.model_config.model_override_args:
        kept += f", {json.dumps(overrides, sort_keys=True)}"
    return ProfileKey(
        model=_named(str(target.model_config.model_path)),
        drafter=_named(str(draft.model_config.model_path)),
        dtype=str(target.dtype),
        device=device,
        parallel=f"tp{parallel.tp_size} pp1 dp{parallel.dp_size} ep{parallel.moe_ep_size}",
        backend=f"{type(target.attn_backend).__name__}, {backend}, {slots} slots{kept}",
        versions=f"sglang {version('sglang')}, torch {version('torch')}, ours {__version__}",
        gamma=int(worker.gamma),
    )


def _named(path: str) -> str:
    """Return a model's path with a digest of its configuration."""
    file = Path(path) / "config.json"
    content = file.read_bytes() if file.is_file() else b""
    return f"{path} {hashlib.sha256(content).hexdigest()[:12]}"
