"""Attach the step to a DSPARK worker of a CPU once its models and pools are ready.

Upstream: sglang/srt/speculative/dspark_components/dspark_worker_v2.py. A worker that our step does
not support stops the server with the reason: upstream's step has no operators for a CPU. `Passes`
times passes of the real models at start-up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_dspark.backends.cpu import linear, packed_weights
from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.cpu.context_kv import Committed
from sglang_dspark.backends.cpu.device import HostDevice
from sglang_dspark.backends.cpu.linear import REVISION
from sglang_dspark.backends.cpu.ragged_layout import layout_of, packed_window, rows_in
from sglang_dspark.backends.cpu.threads import chosen_threads
from sglang_dspark.backends.cpu.verify_forward import verify_forward
from sglang_dspark.common.machine import cpu_description
from sglang_dspark.schedule.cost_table import ProfileKey
from sglang_dspark.schedule.first_drafts import FirstDrafts
from sglang_dspark.serving import mode, profile, startup, upstream
from sglang_dspark.serving.config import current_config
from sglang_dspark.serving.profile_passes import DummyBatches, made_up_tokens, ragged_forward
from sglang_dspark.step.build import build, obstacle, profile_key, refuse_broken
from sglang_dspark.step.drafter_fit import DrafterFit
from sglang_dspark.step.engine_protocol import Engine, VerifyAll
from sglang_dspark.step.ranks import engine_for, ranks_of
from sglang_dspark.step.state import StepState
from sglang_dspark.step.timing import HostClock

logger = logging.getLogger(__name__)


def attach(worker: Any) -> StepState:
    """Profile, calibrate and return the state of our step; stop the server if it cannot serve."""
    refuse_broken(worker)
    reason = _unserved(worker)
    if reason is not None:
        startup.stop(f"DSPARK cannot serve this on a CPU: {reason}")
    read, ranks, device = _seconds(), ranks_of(worker), HostDevice(worker)

    def built(passes: profile.Passes) -> Engine:
        if not mode.host_verifies_all():
            return build(worker, passes, HostClock(read), _key(worker))
        logger.info("sglang-dspark: mode static (%s)", mode.choice().reason)
        slots = int(worker.model_runner.req_to_token_pool.req_to_token.shape[0])
        return VerifyAll(int(worker.gamma), DrafterFit(FirstDrafts(slots)))

    # Ranks follow one plan in every mode: a draft that fails on one of them fails the server.
    return StepState(worker, engine_for(ranks, Passes(worker, device, read), built), device, ranks)


def _unserved(worker: Any) -> str | None:
    """Return the reason why our step cannot serve this worker, with a remedy; None if it can."""
    backend = worker.model_runner.attn_backend
    backend = getattr(backend, "full_attn_backend", backend)  # beside recurrent layers
    if not isinstance(backend, DsparkCpuAttnBackend):
        name = type(backend).__name__
        return f"{name} has no windows of different lengths; remove --attention-backend"
    if upstream.get_parallel().attn_dp_enabled:
        return "ranks of data-parallel attention plan apart; remove --enable-dp-attention"
    reason = obstacle(worker)
    return None if reason is None else f"{reason}; remove --speculative-algorithm"


def _seconds() -> Callable[[], float]:
    """Choose a clock: CPU time for one compute thread, so that other processes do not count.

    Ranks wait for each other, which uses no CPU time, so they need the wall clock.
    """
    alone = chosen_threads() == 1 and upstream.get_parallel().tp_size == 1
    return time.thread_time if alone else time.perf_counter


def _key(worker: Any) -> ProfileKey:
    """Describe the processor, the code that runs the passes, and the models' weight formats."""
    models = worker.target_worker.model_runner.model, worker.draft_model
    forms = [packed_weights.form_in(each) for each in models]
    kept = "/".join(f"{form.name} x {linear.activations_for(form)}" for form in forms)
    products = "our products" if current_config().cpu.matrix_kernel else "BLAS"
    return profile_key(
        worker,
        f"{cpu_description()}; {chosen_threads()} compute threads",
        f"eager, compact, context in batches, kernels {REVISION}, {products}, weights {kept}",
    )


class Passes:
    """The passes of one worker on a CPU, to be timed."""

    tiers: tuple[int, ...] = ()  # passes are not padded

    def __init__(self, worker: Any, device: HostDevice, clock: Callable[[], float]) -> None:
        self._worker, self._device = worker, device
        self._clock = clock
        self._dummies = DummyBatches(worker)
        self.gamma = int(worker.gamma)
        self.depths = tuple(range(1, self.gamma + 1))
        self.most_requests, self.longest = self._dummies.most_requests, self._dummies.longest

    def warm_up(self) -> None:
        """Run one pass of each kind, to compile and allocate."""
        context = min(8, self.longest)
        self.verify_seconds([0], context)
        self.verify_seconds([self.gamma] * min(2, self.most_requests), context)
        for depth in self.depths:
            self.draft_seconds(1, depth, context)

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        """Time a pass that verifies drafts[r] of each request, injection included."""
        with self._dummies.batch(len(drafts), context) as batch:
            began = self._clock()
            self._verify(batch, drafts)
            return self._clock() - began

    def draft_seconds(self, requests: int, depth: int, context: int) -> float:
        """Time the drafting of `depth` positions for every request."""
        with self._dummies.batch(requests, context) as batch:
            began = self._clock()
            self._device.draft(batch, batch.window, depth, None)
            return self._clock() - began

    def _verify(self, batch: Any, drafts: Sequence[int]) -> None:
        layout = layout_of(tuple(drafts))
        rows = rows_in(layout, self.gamma + 1)
        tokens = made_up_tokens(self._worker, len(drafts), self.gamma + 1)
        window = packed_window(rows, tokens, batch.window)
        output = verify_forward(
            self._worker, batch, layout, window,
            runner_forward=lambda: ragged_forward(self._worker, batch, layout, window),
        )  # fmt: skip
        kept, one = rows.starts, torch.ones(len(drafts), dtype=torch.int64)
        self._device.write_context(
            Committed(
                batch.req_pool_indices, one, window.verify_ids[kept], window.positions[kept],
                window.verify_cache_loc[kept], output.hidden_states[kept],
            )
        )  # fmt: skip
