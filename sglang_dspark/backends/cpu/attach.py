"""Puts the step on a DSPARK worker of a CPU once its models and pools are ready.

Upstream: sglang/srt/speculative/dspark_components/dspark_worker_v2.py. A worker that our step does
not serve is refused by name: upstream's step has no operators for a CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang_dspark.backends.cpu import linear, packed_weights
from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.cpu.device import HostDevice
from sglang_dspark.backends.cpu.narrow_matmul import REVISION
from sglang_dspark.backends.cpu.passes import Passes
from sglang_dspark.common.machine import cpu_description
from sglang_dspark.schedule.cost_table import ProfileKey
from sglang_dspark.serving import mode, startup, upstream
from sglang_dspark.serving.config import current_config
from sglang_dspark.step.build import build, obstacle, profile_key, refuse_broken
from sglang_dspark.step.engine_protocol import Engine, VerifyAll
from sglang_dspark.step.ranks import Follower, engine_for, ranks_of
from sglang_dspark.step.state import STATE, StepState
from sglang_dspark.step.timing import HostClock

logger = logging.getLogger(__name__)


def attach(worker: Any) -> None:
    """Profile, calibrate and take over; end the server for what our step does not serve."""
    refuse_broken(worker)
    reason = _unserved(worker)
    if reason is not None:
        startup.stop(f"DSPARK cannot serve this on a CPU: {reason}")
    read = _seconds()
    clock, ranks = HostClock(read), ranks_of(worker)
    device = HostDevice(worker, clock)
    if mode.host_verifies_all():
        logger.info("sglang-dspark: mode static (%s)", mode.choice().reason)
        # Ranks act on one plan here too: a draft that fails on one of them is the server's failure.
        agreement = ranks.agreement
        engine: Engine = (
            VerifyAll(int(worker.gamma))
            if agreement is None or agreement.leads
            else Follower(agreement)
        )
    else:
        key = _key(worker)
        engine = engine_for(
            ranks,
            Passes(worker, device, read),
            lambda passes: build(worker, passes, clock, key),
        )
    worker.__dict__[STATE] = StepState(worker, engine, device, ranks)


def _unserved(worker: Any) -> str | None:
    """Return why our step cannot serve this worker, and what to do; None: it can."""
    backend = worker.model_runner.attn_backend
    if not isinstance(backend, DsparkCpuAttnBackend):
        name = type(backend).__name__
        return f"{name} has no windows of different lengths; remove --attention-backend"
    if upstream.get_parallel().attn_dp_enabled:
        return "ranks of data-parallel attention plan apart; remove --enable-dp-attention"
    reason = obstacle(worker)
    return None if reason is None else f"{reason}; remove --speculative-algorithm"


def _seconds() -> Callable[[], float]:
    """With one compute thread its CPU time: what neighbours take is no cost of a choice.

    Ranks wait for each other, which takes no CPU time.
    """
    from sglang_dspark.backends.cpu.threads import chosen_threads

    alone = chosen_threads() == 1 and upstream.get_parallel().tp_size == 1
    return time.thread_time if alone else time.perf_counter


def _key(worker: Any) -> ProfileKey:
    from sglang_dspark.backends.cpu.threads import chosen_threads

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
