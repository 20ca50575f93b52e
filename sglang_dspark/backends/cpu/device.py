"""Implement `step.device.Device` on a CPU: calls are synchronous, passes have any size.

The rows of a pass stay packed. Where a feature reads the logits window by window (grammar,
log-probabilities, penalties, biases, sampling masks), only the logits are spread over whole
windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import context_kv, delta_rule, plain_step
from sglang_dspark.backends.cpu.accept import accept, agreed
from sglang_dspark.backends.cpu.chain_draft import ChainDraft, ChainModel
from sglang_dspark.backends.cpu.context_kv import Committed
from sglang_dspark.backends.cpu.draft import Drafter
from sglang_dspark.backends.cpu.fast_paths import supported
from sglang_dspark.backends.cpu.greedy_ops import committed
from sglang_dspark.backends.cpu.ragged_layout import (
    PackedRows,
    layout_of,
    packed_window,
    rows_in,
    rows_of,
)
from sglang_dspark.backends.cpu.verify_forward import verify_forward
from sglang_dspark.serving import upstream
from sglang_dspark.step.engine_protocol import Engine, Step
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.step.verify import VerifyInput, VerifyOutput, adjust


class HostDevice:
    """Run the steps of one worker on the host."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._width = int(worker.verify_num_draft_tokens)  # gamma + 1
        # None: the drafter makes a block in one pass.
        self._chain = ChainDraft(worker) if isinstance(worker.draft_model, ChainModel) else None
        self._drafter = self._chain or Drafter(worker)
        self._plain_steps = supported(
            "fast path of steps without drafts", lambda: plain_step.require_worker(worker)
        )

    def plain_step(self, batch: Any, publish: Callable[..., None] | None) -> Any | None:
        """Decode one row per request without drafts; None where the batch requires all stages."""
        worker = self._worker
        table = worker.model_runner.req_to_token_pool.req_to_token
        rows, lens = batch.req_pool_indices, batch.seq_lens
        context_kv.settle(worker.draft_model, table, rows, lens, drafts=False)
        if not (self._plain_steps and plain_step.supports_batch(batch)):
            return None
        return plain_step.run(worker, batch, publish, self.write_context)

    def accepts_in_graph(self, requests: int, admitted: int) -> bool:
        """Return False: there are no graphs on a CPU."""
        return False

    def draft(self, batch: Any, window: Any, depth: int, seeds: Seeds | None) -> Any:
        """Draft by our own forward pass and heads."""
        return self._drafter.propose(batch, window, depth, seeds)

    def begin_prefill(self, batch: Any) -> None:
        """Record the tokens of a prefill: they also make entries of a chain drafter's context."""
        if self._chain is not None:
            self._chain.context.begin_prefill(batch)

    def write_context(self, committed: Committed) -> None:
        """Write or defer the features of committed rows for later drafts."""
        if self._chain is not None:
            self._chain.context.commit(committed)
        else:
            context_kv.write_context(self._worker, committed)

    def admit(self, engine: Engine, step: Step, logits: Tensor | None) -> Tensor:
        """Let the engine admit drafts; return indptr [R + 1] int32 of the verify windows."""
        confidence = None if logits is None else logits.detach().float()
        lengths = engine.admit(step, confidence)
        indptr = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths + 1, out=indptr[1:])
        return torch.from_numpy(indptr)

    def layout(self, step: Step, indptr: Tensor) -> Any:
        """Build the ragged layout, without padding."""
        return layout_of(tuple((np.diff(indptr.numpy()) - 1).tolist()))

    def run(self, inputs: VerifyInput) -> VerifyOutput:
        """Run the target over packed rows."""
        worker, batch = self._worker, inputs.batch
        rows = rows_in(inputs.layout, self._width)
        window = packed_window(rows, inputs.ids, inputs.window)
        output = verify_forward(worker, batch, inputs.layout, window, inputs.window.kv_loc_plan)
        if plain_step.reads_windows(batch):
            output.next_token_logits = self._spread(inputs, rows, output.next_token_logits)
        return VerifyOutput(output, output.hidden_states, rows=(rows, window))

    def _spread(self, inputs: VerifyInput, rows: PackedRows, logits: Tensor) -> Tensor:
        """Spread logits [N, V] over windows [R * (gamma + 1), V], and adjust them."""
        spread = logits.new_zeros(inputs.requests * self._width, logits.shape[1])
        spread[rows.index] = logits
        if inputs.rules.penalties is not None:
            inputs.rules.penalties.apply(spread, inputs.read_ids, inputs.batch.seq_lens)
        adjust(self._worker, inputs.batch, spread)
        return spread

    def accept(self, inputs: VerifyInput, verified: VerifyOutput) -> Any:
        """Accept by our rules over the verified rows; ranks act on rank 0's outcome."""
        logits, block = verified.outputs.next_token_logits, inputs.proposal.draft_block
        info, prefix = inputs.batch.sampling_info, inputs.batch.seq_lens
        rows: PackedRows = verified.rows[0]
        starts = rows.starts if logits.shape[0] == rows.total else rows.strided
        ids, seeds = inputs.ids, inputs.rules.seeds
        outcome = accept(ids, rows.lens, starts, logits, block, info, prefix, seeds)
        accepted, bonus = (agreed(each, self._worker._tp_sync) for each in outcome)
        commit, lens, tokens = committed(block.draft_tokens, accepted, bonus, prefix)
        return upstream.AcceptOuts(
            correct_len=accepted,
            bonus=bonus,
            cap_trim_lens=torch.zeros_like(accepted),  # no admitted draft is dropped afterwards
            commit_lens=commit,
            new_seq_lens=lens,
            out_tokens=tokens,
        )

    def commit(self, inputs: VerifyInput, verified: VerifyOutput, accepted: Any) -> None:
        """Store the data of the committed rows that later passes and drafts read."""
        if self._worker._need_mamba_verify_commit:
            delta_rule.store_accepted(self._worker, inputs.batch, accepted.commit_lens)
        if inputs.rules.penalties is not None:
            inputs.rules.penalties.count(accepted.out_tokens, accepted.commit_lens)
        rows, window = verified.rows
        hidden, commit = verified.hidden, accepted.commit_lens
        assert hidden is not None, "a verify pass captures hidden states"
        tokens, slots, positions = window.verify_ids, window.verify_cache_loc, window.positions
        kept = int(commit.sum())
        if kept < rows.total:
            chosen = rows_of(rows.starts, commit, kept)
            hidden, tokens = hidden[chosen], tokens[chosen]
            slots, positions = slots[chosen], positions[chosen]
        requests = inputs.batch.req_pool_indices
        self.write_context(Committed(requests, commit, tokens, positions, slots, hidden))
