"""Write hidden states of a verify pass into the draft's context, as keys and values.

Every row of the pass is written, accepted or not, so a graph needs no outcome to write. A rejected
row is harmless, because it is overwritten before it is read:

1. A row's slot belongs to its own request and position, past the request's committed length.
2. A draft reads slots below the committed length, and those of its own block, which it writes
   itself. The anchor of the next block has the first rejected position.
3. A verify pass covers a window from the committed length on, and rows become committed in order,
   so a slot is written with its final token before the committed length passes it.
4. The target's own pass writes rejected rows into the same slots of its cache. So both caches
   handle a slot that is freed, shared by prefix or assigned to another request alike.

Rows that only fill a graph's size have slot 0, which no request owns.

Upstream: `TargetHiddenKvInjector.inject_ragged` in sglang/srt/speculative/
dspark_components/dspark_kv_inject.py, which projects windows of gamma + 1 rows and skips rejected
rows when it writes.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dspark.backends.cuda.chain_model import ChainModel
from sglang_dspark.backends.cuda.draft_context import DraftContext, context_of, obstacle
from sglang_dspark.kernels.commit_write import write_triton
from sglang_dspark.kernels.platform import runs_on

logger = logging.getLogger(__name__)


class ContextRows(NamedTuple):
    """hidden: [T, F]. positions, slots: [T] int64, each row's in its request and in the cache."""

    hidden: Tensor
    positions: Tensor
    slots: Tensor


class StepCommit:
    """Write rows of one drafter; log once why a GPU writes by SGLang's calls.

    injector: upstream's `TargetHiddenKvInjector`.
    """

    def __init__(self, injector: Any) -> None:
        self._injector = injector
        self._context: DraftContext | None = None
        self._refused: tuple[Any, Any] | None = None  # a model and its cache

    @property
    def is_latent(self) -> bool:
        """Return whether the cache is of a latent attention, which only SGLang writes."""
        return hasattr(self._pool, "set_swa_key_buffer_radix_fused_norm_rope")

    @torch.inference_mode()
    def write(self, rows: ContextRows) -> None:
        """Write keys and values of the rows into the draft's cache."""
        context = self.context(rows.hidden.device)
        if context is None:
            _write_by_upstream(self._injector, rows)
            return
        features = self._injector.draft_model.project_target_hidden(rows.hidden)
        projected = context.project(features)  # of all layers in one product
        cos_sin = context.rotary.cos_sin_cache  # reallocated for longer positions
        write_triton(context.layers, projected, cos_sin, rows.positions, rows.slots)

    def context(self, device: torch.device) -> DraftContext | None:
        """Return the draft context, resolved again if weights or cache were replaced; None: SGLang
        writes it, or chain_context.py that of a chain drafter."""
        model, pool = self._injector.draft_model, self._pool
        if not runs_on(device) or self.is_latent or isinstance(model, ChainModel):
            return None
        if self._refused is not None and self._refused == (model, pool):
            return None
        if self._context is None or not self._context.holds(model, pool):
            reason = obstacle(model, pool)
            self._context = context_of(model, pool) if reason is None else None
            if reason is not None:
                self._refused = (model, pool)
                logger.warning("the draft's context is written by SGLang's calls: %s", reason)
        return self._context

    @property
    def _pool(self) -> Any:
        return self._injector.draft_model_runner.token_to_kv_pool


def _write_by_upstream(injector: Any, rows: ContextRows) -> None:
    injector.inject_target_hidden(
        target_hidden=rows.hidden, cache_loc=rows.slots, positions=rows.positions
    )
