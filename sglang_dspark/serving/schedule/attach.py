"""Puts a `ScheduleEngine` on a DSPARK worker once its models and pools are ready.

Upstream: sglang/srt/speculative/dspark_components/dspark_worker_v2.py (0.5.23). The seams of a
step (patches/cpu_schedule_step.py) find the engine on the objects they belong to. Where we cannot
schedule, the worker verifies every draft and the log says why: never a crash.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dspark import __version__
from sglang_dspark.common.machine import cpu_description
from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.calibration import Calibration
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.cost_table import ProfileKey
from sglang_dspark.schedule.early_stop import EarlyStopPlanner
from sglang_dspark.schedule.guard import SERVING_GUARD
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.plan import PlannerConfig
from sglang_dspark.schedule.planner import SearchPlanner
from sglang_dspark.schedule.planner_protocol import Planner
from sglang_dspark.schedule.static_threshold import ThresholdPlanner
from sglang_dspark.schedule.sts_file import FILE_NAME, REGIMES, read_sts
from sglang_dspark.serving.config import current_config
from sglang_dspark.serving.schedule import mode, pause, profile
from sglang_dspark.serving.schedule.metrics import Collector, StepMetrics
from sglang_dspark.serving.schedule.passes import Passes
from sglang_dspark.serving.schedule.speed import SpeedTargets
from sglang_dspark.serving.step.clock import Clock, HostClock
from sglang_dspark.serving.step.engine import ScheduleEngine

logger = logging.getLogger(__name__)

SPREAD = 0.1  # how far requests stray where no table tells: variance of logits, as the demo's do
ENGINE = "dspark_schedule"  # attribute of upstream's objects that hold the engine


def engine_of(owner: Any) -> ScheduleEngine | None:
    """The engine that schedules this worker, planner, proposer or executor; None without one."""
    return owner.__dict__.get(ENGINE)


def attach(worker: Any) -> None:
    """Profile, calibrate and take over, or say in one line why not."""
    chosen = mode.choice()
    if not chosen.ours:
        logger.info("sglang-dspark: mode %s (%s)", worker._verify_planner.mode_value, chosen.reason)
        return
    obstacle = _obstacle(worker)
    if obstacle is not None:
        verify_everything(worker)
        logger.warning("sglang-dspark: every draft is verified: %s", obstacle)
        return
    _take_over(worker)


def _obstacle(worker: Any) -> str | None:
    """Why this worker cannot be scheduled."""
    from sglang.srt.runtime_context import get_parallel

    from sglang_dspark.serving.cpu.attention import DsparkCpuAttnBackend

    runner = worker.model_runner
    if not isinstance(runner.attn_backend, DsparkCpuAttnBackend):
        return f"{type(runner.attn_backend).__name__} has no windows of unlike lengths here"
    if get_parallel().tp_size > 1 or get_parallel().attn_dp_enabled:
        return "several ranks would have to agree on lengths"
    if worker._simulated_correct_len is not None:
        return "SGLANG_SIMULATE_ACC_LEN is set"
    if worker._need_mamba_verify_commit:
        return "the target keeps a recurrent state"
    if not worker.sample_from_anchor:
        return "the drafter does not predict from its anchor"
    return None


def verify_everything(worker: Any) -> None:
    """Static verification, whatever mode the models were loaded in."""
    from sglang.srt.speculative.ragged_verify import RaggedVerifyMode

    worker._verify_planner._budget_planner = None
    worker._verify_planner._ragged_verify_mode = RaggedVerifyMode.STATIC


def _take_over(worker: Any) -> None:
    proposers = _proposers(worker)
    read = _clock()
    engine = build(worker, Passes(worker, proposers, read), HostClock(read), _key(worker))
    worker._verify_planner._budget_planner = None
    for owner in (worker, worker._proposer, worker._verify_planner, worker._verify_executor):
        owner.__dict__[ENGINE] = engine
    worker._proposer.__dict__["dspark_proposers"] = proposers
    worker.__dict__[pause.FITS] = pause.fits(worker)


def build(worker: Any, passes: profile.Passes, clock: Clock, key: ProfileKey) -> ScheduleEngine:
    """Profile, calibrate and compile what the scheduler of a worker needs; logs one line.

    passes: of the worker's models, on its device. clock: what its steps are timed by.
    """
    gamma = int(worker.gamma)
    chosen = current_config().schedule
    profiled = profile.table_for(key, passes, chosen.profile_seconds, _tell)
    has_head = worker.draft_model.confidence_head is not None
    pool_rows = int(worker.model_runner.req_to_token_pool.req_to_token.shape[0])
    calibration, calibrated = _calibration(worker, gamma, pool_rows)
    config = PlannerConfig(lag=_lag(), has_head=has_head, guard=SERVING_GUARD)
    _rehearse(_planner(gamma, CostModel(profiled.table, pool_rows), config), calibration)
    planner = _planner(gamma, CostModel(profiled.table, pool_rows), config)
    metrics = StepMetrics(planner, calibration, _collector())
    speeds = SpeedTargets(pool_rows, chosen.speed_target)
    _announce(planner, profiled, calibrated)
    return ScheduleEngine(planner, calibration, metrics, clock, chosen.fairness_floor, speeds)


def _lag() -> int:
    """Steps between a confidence and the plan that reads it: under the overlap loop a step is
    planned while the one before it runs."""
    from sglang.srt.runtime_context import get_schedule

    return 1 if get_schedule().disable_overlap_schedule else 2


def _announce(planner: Planner, profiled: profile.Profiled, calibrated: str) -> None:
    """The one line that says what was profiled, from where, the mode and the algorithm."""
    logger.info(
        "sglang-dspark: mode compact, scheduled by %s; step times of 1 to %d tokens and drafts of "
        "1 to %d positions %s; %s",
        planner.describe(),
        profiled.table.knots[-1],
        planner.gamma,
        profiled.source,
        calibrated,
    )


def _planner(gamma: int, costs: CostModel, config: PlannerConfig) -> Planner:
    """The scheduler that the configuration asks for, knowing nothing yet."""
    chosen = current_config().schedule
    if chosen.threshold is not None:
        return ThresholdPlanner(chosen.threshold, gamma, costs.max_requests, costs, config)
    if chosen.algorithm == "early-stop":
        return EarlyStopPlanner(gamma, costs.max_requests, costs, config)
    return SearchPlanner(gamma, costs.max_requests, costs, config)


def _clock() -> Callable[[], float]:
    """With one compute thread its CPU time: what neighbours take is no cost of a choice."""
    from sglang_dspark.serving.cpu.threads import chosen_threads

    return time.thread_time if chosen_threads() == 1 else time.perf_counter


def _tell(line: str) -> None:
    logger.info("sglang-dspark: %s", line)


def _proposers(worker: Any) -> dict[int, Any]:
    """A proposer for each depth 1 .. gamma; they share the model and the noise."""
    from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockProposer

    whole = worker._proposer
    proposers = {int(worker.gamma): whole}
    for depth in range(1, int(worker.gamma)):
        shallow = DraftBlockProposer(
            draft_model=worker.draft_model,
            draft_model_runner=worker.draft_model_runner,
            gamma=depth,
            mask_token_id=worker._mask_token_id,
            draft_block_spec_info=make_draft_block_spec_info(
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


def _calibration(worker: Any, gamma: int, pool_rows: int) -> tuple[OnlineCalibration, str]:
    """From the drafter's table where there is one; and what the log says of it."""
    identity = OnlineCalibration(
        [replace(Calibration.identity(gamma), spread=SPREAD)] * len(REGIMES), pool_rows=pool_rows
    )
    folder = Path(str(worker.draft_model_runner.model_config.model_path))
    path = folder / FILE_NAME
    if not path.is_file():
        return identity, "no sts.json: confidence is calibrated online"
    try:
        sts = read_sts(path, drafter_sha256=_weights_sha256(folder), gamma=gamma)
    except DSparkError as error:
        logger.warning("sglang-dspark: %s; confidence is calibrated online", error)
        return identity, "sts.json not used"
    tables = [sts.table(temperature).followed for temperature in (0.0, 1.0)]
    calibration = OnlineCalibration(tables, pool_rows=pool_rows)
    return calibration, f"calibrated by {path} and online"


def _weights_sha256(folder: Path) -> str:
    from sglang_dspark.models.identity import target_sha256

    return target_sha256(folder)


def _collector() -> Collector | None:
    """Metrics where SGLang exports its own."""
    from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

    if not get_observability().enable_metrics:
        return None
    labels = {"model_name": get_serving().served_model_name, "tp_rank": get_parallel().tp_rank}
    return Collector({name: str(value) for name, value in labels.items()})


def _key(worker: Any) -> ProfileKey:
    """What the step times of this server depend on."""
    from sglang_dspark.serving.cpu.threads import chosen_threads

    target, draft = worker.model_runner, worker.draft_model_runner
    return ProfileKey(
        model=named(str(target.model_config.model_path)),
        drafter=named(str(draft.model_config.model_path)),
        dtype=str(target.dtype),
        device=f"{cpu_description()}; {chosen_threads()} compute threads",
        parallel="tp1 pp1 dp1 ep1",
        backend=(
            f"{type(target.attn_backend).__name__}, eager, compact, context in batches, "
            f"matrix_kernel {current_config().cpu.matrix_kernel}, "
            f"{target.req_to_token_pool.req_to_token.shape[0]} seats"
        ),
        versions=f"sglang {version('sglang')}, torch {version('torch')}, ours {__version__}",
        gamma=int(worker.gamma),
    )


def named(path: str) -> str:
    """A model's path with a digest of its configuration."""
    file = Path(path) / "config.json"
    content = file.read_bytes() if file.is_file() else b""
    return f"{path} {hashlib.sha256(content).hexdigest()[:12]}"


def _rehearse(planner: Planner, calibration: OnlineCalibration) -> None:
    """Some steps of one request, so that what is compiled is compiled before the first request."""
    rows, tenants = np.zeros(1, np.int64), np.ones(1, np.int64)
    confidence = np.full((1, planner.gamma), 0.5, np.float32)
    logits, none = np.zeros((1, planner.gamma), np.float32), np.zeros(1, np.int64)
    for step in range(4):
        plan = planner.plan(step, rows, tenants, context=0)
        calibration.confidence(logits, none, confidence, (rows, tenants))
        lengths = planner.admit(plan, confidence)
        planner.publish(plan, rows, tenants, confidence)
        planner.finished(plan, rows, tenants, none, lengths, confidence, plan.budget.seconds)
        calibration.observe(logits, none, none, none, (rows, tenants), confidence)
