"""`step.device.Device` on a CPU: work is done when its call returns, and passes have any size.

A ragged pass keeps its rows packed, row by row as they were computed: upstream
(srt/speculative/dspark_components/dspark_verify.py) spreads logits and features over whole windows,
9 MB at eight users. Where something reads the logits window by window (grammar, log-probabilities,
penalties, biases, sampling masks) pass and commit are upstream's; the accept rule is ours all the
same. A pass over whole windows is upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.serving.cpu import context_kv, plain_step
from sglang_dspark.serving.cpu.accept import accept_rows
from sglang_dspark.serving.cpu.fast_paths import fits
from sglang_dspark.serving.cpu.layout import PackedRows, layout_of, rows_in, window_of
from sglang_dspark.serving.cpu.ragged_ops import rows_of
from sglang_dspark.serving.step.clock import Clock
from sglang_dspark.serving.step.engine import Step
from sglang_dspark.serving.step.passes import Pass, Verified
from sglang_dspark.serving.step.penalties import OutputCounts
from sglang_dspark.serving.step.ranks import Engine
from sglang_dspark.serving.step.rules import Rules


@dataclass(frozen=True)
class _Packed:
    """How the rows of a pass lie in its windows, and upstream's window of them."""

    rows: PackedRows
    window: Any


class HostDevice:
    """Runs the steps of one worker where the host computes."""

    def __init__(self, worker: Any, clock: Clock, short_pass: plain_step.ShortPass) -> None:
        """short_pass: the target over one row a request, without SGLang's runner around it."""
        self.clock = clock
        self._worker, self._executor = worker, worker._verify_executor
        self._width = int(worker.verify_num_draft_tokens)  # gamma + 1
        self._short_pass = short_pass
        self._fits = fits("steps without drafts in short", lambda: plain_step.require(worker))

    def plain_step(self, batch: Any, publish: Callable[..., None] | None) -> Any | None:
        """One row a request, where nothing else looks at the step."""
        worker = self._worker
        table = worker.model_runner.req_to_token_pool.req_to_token
        context_kv.defer_context(worker.draft_model, table, batch.req_pool_indices, batch.seq_lens)
        if not (self._fits and plain_step.takes(batch)):
            return None
        return plain_step.run(worker, batch, publish, self._short_pass)

    def rules(self, counts: OutputCounts, batch: Any) -> Rules:
        """None: penalties, seeds and laws are kept where a CPU samples (patches/cpu_*.py)."""
        return Rules()

    def accepts_in_graph(self, requests: int, admitted: int) -> bool:
        """There are no graphs here."""
        return False

    def admit(
        self, engine: Engine, step: Step, logits: Tensor | None, greedy: Tensor | None
    ) -> Tensor:
        """indptr [R + 1] int32, and what it was found by is published."""
        read = None if logits is None else logits.detach().float()
        lengths = engine.admit(step, read, greedy)
        indptr = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths + 1, out=indptr[1:])
        return torch.from_numpy(indptr)

    def layout(self, step: Step, indptr: Tensor) -> Any | None:
        """Without padding; None where every request has all its drafts verified."""
        drafts = np.diff(indptr.numpy()) - 1
        return None if int(drafts.min()) == self._width - 1 else layout_of(drafts)

    def run(self, asked: Pass) -> Verified:
        """The target's pass, over packed rows where there is a layout."""
        batch, executor = asked.batch, self._executor
        if asked.layout is None:
            done = executor.run_non_compact(
                batch=batch,
                draft_input=asked.came,
                verify_ids_2d=asked.ids,
                verify_window=asked.window,
                sampling_info=batch.sampling_info,
            )
            return Verified(done.logits_output, None)
        block, tokens = asked.proposal.draft_block_ids, asked.proposal.draft_block.draft_tokens
        rows = rows_in(asked.layout, self._width)
        packed = _Packed(rows, window_of(rows, block, tokens, asked.window))
        if plain_step.reads_windows(batch):
            done, hidden = executor.run_compact(
                batch=batch,
                layout=asked.layout,
                draft_block_ids=block,
                draft_tokens=tokens,
                bs=asked.requests,
                device=self._worker.device,
                sampling_info=batch.sampling_info,
                verify_window=asked.window,
            )
            return Verified(done.logits_output, hidden, rows=packed)
        done = executor._run_ragged(
            batch=batch,
            layout=asked.layout,
            ragged_window=packed.window,
            sampling_info=batch.sampling_info,
            kv_loc_plan=asked.window.kv_loc_plan,
        )
        return Verified(done.logits_output, done.logits_output.hidden_states, rows=packed)

    def accept(self, asked: Pass, verified: Verified) -> Any:
        """By our rule over the rows that were verified; by upstream's over whole windows."""
        logits, block = verified.outputs.next_token_logits, asked.proposal.draft_block
        info, prefix = asked.batch.sampling_info, asked.batch.seq_lens
        if verified.rows is None:
            return self._executor.accept_and_finalize(
                folded_accept=False,
                bs=asked.requests,
                verify_ids_2d=asked.ids,
                target_logits=logits,
                draft_block=block,
                sampling_info=info,
                draft_input=asked.came,
                layout=None,
                prefix_lens=prefix,
                draft_tokens=block.draft_tokens,
            )
        rows: PackedRows = verified.rows.rows
        starts = rows.starts if logits.shape[0] == rows.total else rows.strided
        ids, agree = asked.ids, self._executor._tp_sync
        return accept_rows(ids, rows.lens, starts, logits, block, info, prefix, agree)

    def commit(self, asked: Pass, verified: Verified, accepted: Any) -> None:
        """Hidden states of accepted rows, from packed rows where they are packed."""
        packed, hidden = verified.rows, verified.hidden
        if packed is not None and hidden is not None and hidden.shape[0] == packed.rows.total:
            self._commit_packed(packed, hidden, accepted.commit_lens)
            return
        self._executor.commit_hidden(
            batch=asked.batch,
            layout=asked.layout,
            hidden_strided=hidden,
            verify_window=asked.window,
            logits_output=verified.outputs,
            commit_lens=accepted.commit_lens,
            bs=asked.requests,
            run_compact=asked.layout is not None,
        )

    def _commit_packed(self, packed: _Packed, hidden: Tensor, commit: Tensor) -> None:
        """hidden: [rows, m * d]; commit: [R] tokens that each request keeps of its rows."""
        rows, window = packed.rows, packed.window
        slots, positions, kept = window.verify_cache_loc, window.positions, int(commit.sum())
        if kept < rows.total:
            chosen = rows_of(rows.starts, commit, kept)
            hidden, slots, positions = hidden[chosen], slots[chosen], positions[chosen]
        self._executor.kv_injector.inject_target_hidden(
            target_hidden=hidden,
            cache_loc=slots,
            cache_loc_2d=None,
            positions=positions,
            commit_lens=None,
        )
