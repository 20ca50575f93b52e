"""Passes of the real models over made-up requests, for timing them before the first request.

Every pass takes the way of a decode step (sglang/srt/speculative/dspark_components/
{dspark_draft,dspark_verify}.py, 0.5.23): a draft block, or a ragged verify pass with the context
injection of one token a request behind it. The requests sit in the first pool rows, which are
pointed at slots of the whole cache and cleared afterwards; nothing is allocated, and what the
passes write lies in slots that are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.serving.schedule.layout import layout_of, rows_in, window_of


class Passes:
    """Runs passes of one worker; `proposers[d]` drafts d positions."""

    def __init__(self, worker: Any, proposers: dict[int, Any], clock: Callable[[], float]) -> None:
        self._worker = worker
        self._clock = clock
        self._proposers = proposers
        self.gamma = int(worker.gamma)
        self._runner = worker.model_runner
        self._pool = worker.model_runner.req_to_token_pool

    @property
    def most_requests(self) -> int:
        """Requests that fit the pool; row 0 is padding."""
        return int(self._pool.req_to_token.shape[0]) - 1

    @property
    def longest(self) -> int:
        """Longest context that leaves room for a window."""
        slots = int(self._runner.token_to_kv_pool.size)
        return min(int(self._pool.req_to_token.shape[1]), slots) - self.gamma - 1

    def warm_up(self) -> None:
        """One pass of each kind, for what only a first pass does: compiling, first allocations."""
        context = min(8, self.longest)
        self.verify_seconds([0], context)
        self.verify_seconds([self.gamma] * min(2, self.most_requests), context)
        for depth in range(1, self.gamma + 1):
            self.draft_seconds(1, depth, context)

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        """Seconds of a pass that verifies drafts[r] of each request, injection included."""
        with self._seated(len(drafts), context) as batch:
            began = self._clock()
            self._verify(batch, drafts)
            return self._clock() - began

    def draft_seconds(self, requests: int, depth: int, context: int) -> float:
        """Seconds of drafting `depth` positions for every request."""
        with self._seated(requests, context) as batch:
            began = self._clock()
            self._draft(batch, depth)
            return self._clock() - began

    @contextmanager
    def _seated(self, requests: int, context: int) -> Iterator[Any]:
        """`requests` made-up requests with `context` tokens each."""
        table = self._pool.req_to_token
        rows = torch.arange(1, requests + 1)
        width = context + self.gamma + 1
        kept = table[1 : requests + 1, :width].clone()
        size = int(self._runner.token_to_kv_pool.size)
        slots = torch.arange(requests * width).remainder(size) + 1
        table[1 : requests + 1, :width] = slots.view(requests, width).to(table.dtype)
        try:
            with torch.no_grad():
                yield self._batch(rows, context)
        finally:
            table[1 : requests + 1, :width] = kept

    def _draft(self, batch: Any, depth: int) -> None:
        self._proposers[depth].propose(
            batch=batch,
            draft_input=SimpleNamespace(
                bonus_tokens=torch.ones(len(batch.seq_lens), dtype=torch.int64),
                nxt_kv_lens_cpu=None,
            ),
            verify_window=batch.window,
            bs=len(batch.seq_lens),
            device=self._worker.device,
            target_model=self._worker.target_worker.model_runner.model,
            sampling_info=None,
        )

    def _verify(self, batch: Any, drafts: Sequence[int]) -> None:
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )
        from sglang.srt.speculative.dflash_info import DFlashVerifyInput
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        requests = len(drafts)
        layout = layout_of(np.asarray(drafts, np.int64))
        rows = rows_in(layout, self.gamma + 1)
        tokens = torch.ones(requests, self.gamma + 1, dtype=torch.int64)
        window = window_of(rows, tokens[:, :1], tokens[:, 1:], batch.window)
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=window.verify_ids,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=window.verify_cache_loc,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            positions=window.positions,
            spec_algorithm=SpeculativeAlgorithm.DSPARK,
            spec_info=DFlashVerifyInput(
                draft_token=window.verify_ids,
                positions=window.positions,
                draft_token_num=self.gamma + 1,
                capture_hidden_mode=CaptureHiddenMode.FULL,
                ragged_verify_layout=layout,
            ),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            global_num_token_non_padded_cpu=rows.total,
        )
        batch.window.kv_loc_plan.bind(
            forward, self._runner.kv_index_translator, cols=window.window_index
        )
        self._runner.attn_backend.init_forward_metadata(forward)
        out = self._worker.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
        )
        self._inject(out.logits_output.hidden_states, rows.starts, window)

    def _inject(self, hidden: Tensor, first: Tensor, window: Any) -> None:
        self._worker._kv_injector.inject_target_hidden(
            target_hidden=hidden[first],
            cache_loc=window.verify_cache_loc[first],
            cache_loc_2d=None,
            positions=window.positions[first],
            commit_lens=None,
        )

    def _batch(self, rows: Tensor, context: int) -> Any:
        from sglang.srt.speculative.dspark_components.dspark_planner import alloc_verify_window

        lens = torch.full((len(rows),), context, dtype=torch.int64)
        batch = SimpleNamespace(
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=None,
            can_run_decode_cuda_graph=False,
            is_extend_in_batch=False,
            dp_spec_prefill_coordination_applied=False,
            global_num_tokens=None,
        )
        batch.window = alloc_verify_window(
            batch=batch,
            bs=len(rows),
            device=self._worker.device,
            verify_num_draft_tokens=self.gamma + 1,
            block_pos_offsets=self._worker._block_pos_offsets,
            model_runner=self._runner,
            seq_lens_cpu=None,
        )
        return batch
