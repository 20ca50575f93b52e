"""Write hidden states of emitted tokens into the draft's context: pack, project, store.

Upstream: `TargetHiddenKvInjector.inject_ragged` in sglang/srt/speculative/
dspark_components/dspark_kv_inject.py, which projects whole windows and skips rejected rows when
it writes.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cuda.draft_context import DraftContext, context_of, obstacle
from sglang_dspark.kernels.commit_rows import Packed, pack_torch, pack_triton
from sglang_dspark.kernels.commit_write import write_triton
from sglang_dspark.kernels.platform import runs_on

logger = logging.getLogger(__name__)


class StepCommit:
    """Chooses the way of each step; says once why a GPU writes by SGLang's calls."""

    def __init__(self) -> None:
        self._context: DraftContext | None = None
        self._refused: tuple[Any, Any] | None = None  # a model and its cache

    def __call__(
        self, worker: Any, batch: Any, window: Any, hidden: Tensor, emitted: Tensor, rows: int
    ) -> bool:
        """Write keys and values of the first emitted[r] rows of each window.

        window: upstream's `VerifyWindow`. hidden: [R (gamma + 1), F] of the target's pass. emitted:
        [R] int32 on the device. rows: of the pass, no fewer than are emitted. False: nothing was
        written, as here SGLang's own way over whole windows takes no more rows.
        """
        if _latent(worker):
            return False
        if rows >= len(hidden) and self._resolved(worker, hidden.device) is None:
            return False
        slots = worker._kv_injector.ids_for(window.kv_loc_plan).long().view(len(emitted), -1)
        pack = pack_triton if runs_on(hidden.device) else pack_torch
        most = min(rows, len(hidden))
        self.write(worker, pack(hidden, emitted, batch.seq_lens, slots.contiguous(), most))
        return True

    @torch.inference_mode()
    def write(self, worker: Any, packed: Packed) -> None:
        """Keys and values of packed rows into the draft's cache."""
        context = self._resolved(worker, packed.hidden.device)
        if context is None:
            _write_by_upstream(worker._kv_injector, packed)
            return
        features = worker._kv_injector.draft_model.project_target_hidden(packed.hidden)
        projected = context.project(features)  # of all layers in one product
        cos_sin = context.rotary.cos_sin_cache  # made anew for longer positions
        write_triton(context.layers, projected, cos_sin, packed.positions, packed.slots)

    def _resolved(self, worker: Any, device: torch.device) -> DraftContext | None:
        """Anew when weights or cache were exchanged; None: SGLang writes."""
        if not runs_on(device):
            return None
        model, pool = worker._kv_injector.draft_model, _pool(worker)
        if self._refused is not None and self._refused == (model, pool):
            return None
        if self._context is None or not self._context.holds(model, pool):
            reason = obstacle(model, pool)
            self._context = context_of(model, pool) if reason is None else None
            if reason is not None:
                self._refused = (model, pool)
                logger.warning("the draft's context is written by SGLang's calls: %s", reason)
        return self._context


def _pool(worker: Any) -> Any:
    return worker._kv_injector.draft_model_runner.token_to_kv_pool


def _latent(worker: Any) -> bool:
    """The cache of a latent attention has a writer of its own, and windows of its own shape."""
    return hasattr(_pool(worker), "set_swa_key_buffer_radix_fused_norm_rope")


def _write_by_upstream(injector: Any, packed: Packed) -> None:
    injector.inject_target_hidden(
        target_hidden=packed.hidden,
        cache_loc=packed.slots,
        cache_loc_2d=None,
        positions=packed.positions,
        commit_lens=None,
    )
