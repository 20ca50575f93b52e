"""Run upstream's compact verify pass over rows that one launch indexes.

Re-implements `TargetVerifyExecutor.run_compact` (sglang/srt/speculative/dspark_components/
dspark_verify.py): upstream indexes the rows, and pads the windows to the graph's slots three times,
by launches from the host that last longer than a small pass computes. Logits are scattered to
windows only in steps that read more of them than the graph's accept rule or plain decoding's
sampler.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dspark.kernels.pass_rows import PassRows, rows_torch, rows_triton
from sglang_dspark.kernels.platform import runs_on
from sglang_dspark.serving import upstream
from sglang_dspark.step.verify import VerifyInput


class CompactPass(NamedTuple):
    """in_graph: a captured pass ran. outputs: upstream's `LogitsProcessorOutput`, its logits in
    window order, [R (gamma + 1), V], or packed, [T, V], if only a graph's accept rule reads
    them. hidden: [T, F] of the packed rows."""

    in_graph: bool
    outputs: Any
    hidden: Tensor
    rows: PassRows


def compact_pass(
    worker: Any, asked: VerifyInput, slots: int, sampling_info: Any, *, anchors: bool
) -> CompactPass:
    """Run the target over the windows.

    slots: of the captured graphs. sampling_info: with the logit adjustments to apply, or None.
    anchors: no drafts are verified, and only the rows of anchors are read, [R, V].
    """
    executor, width = worker._verify_executor, asked.ids.shape[1]
    epilogue, layout = executor.verify_epilogue, asked.layout
    rows = index_rows(worker, asked.batch, layout, asked.ids, slots)
    if epilogue is not None:
        epilogue.begin_step(layout.verify_lens, armed=asked.foldable)
    done = executor._run_ragged(
        batch=asked.batch,
        layout=padded_layout(layout, rows, width),
        ragged_window=ragged_window_of(rows),
        sampling_info=sampling_info,
        kv_loc_plan=asked.window.kv_loc_plan,
    )
    outputs, in_graph = done.logits_output, bool(done.can_run_cuda_graph)
    hidden = outputs.hidden_states
    if not (asked.foldable and in_graph) or reads_logits(asked.batch):
        packed = outputs.next_token_logits
        read = packed[: asked.requests] if anchors else strided(packed, layout, width)
        upstream.apply_logits_adjustments_strided(
            next_token_logits=read,
            sampling_info=sampling_info,
            verify_num_draft_tokens=1 if anchors else width,
        )
        outputs.next_token_logits = read
    return CompactPass(in_graph, outputs, hidden, rows)


def reads_logits(batch: Any) -> bool:
    """Return whether requests report values of logits that a graph has already accepted by."""
    info = batch.sampling_info
    masks = info is not None and info.sampling_mask_batch_indices is not None
    return masks or bool(batch.return_logprob)


def strided(compact: Tensor, layout: Any, width: int) -> Tensor:
    """Return rows of the pass in window order, [R width, features]; zeros past a window's end."""
    return upstream.ScatterCompactToStrided.execute(  # type: ignore[no-any-return]
        compact=compact, layout=layout, fill_value=0.0, verify_num_draft_tokens=width
    )


def index_rows(worker: Any, batch: Any, layout: Any, ids: Tensor, slots: int) -> PassRows:
    """Return the rows of a pass of `layout.graph_num_tokens`; ids: [R, gamma + 1] int64."""
    index = rows_triton if runs_on(torch.device(worker.device)) else rows_torch
    tokens, requests = layout.graph_num_tokens, len(ids)
    return index(
        layout.qo_indptr_device,
        ids.contiguous(),
        batch.seq_lens,
        batch.req_pool_indices,
        worker.model_runner.req_to_token_pool.req_to_token,
        tokens,
        max(min(tokens, slots), requests),
    )


def ragged_window_of(rows: PassRows) -> Any:
    """Return upstream's `RaggedVerifyWindow` of the rows."""
    return upstream.RaggedVerifyWindow(
        positions=rows.positions,
        verify_cache_loc=rows.slots,
        verify_ids=rows.ids,
        window_index=rows.places,
    )


def padded_layout(layout: Any, rows: PassRows, width: int) -> Any:
    """Return the layout with its windows for the graph's slots, which upstream requests."""
    return _layout_type()(
        verify_lens=layout.verify_lens,
        graph_num_tokens=layout.graph_num_tokens,
        extend_start_loc=layout.extend_start_loc,
        qo_indptr_device=layout.qo_indptr_device,
        rows=rows,
        width=width,
    )


@cache
def _layout_type() -> Any:
    """Define the type of `padded_layout` at its first use, when SGLang is loaded."""

    class PaddedLayout(upstream.RaggedVerifyLayout, frozen=True):  # type: ignore[misc,call-arg]
        """Upstream's layout with its windows for a graph's slots. width: gamma + 1."""

        rows: Any = None
        width: int = 0

        def padded_to_bucket(self, *, padded_bs: int, cap: int | None = None) -> Any:
            """Return the layout of `padded_bs` slots; cap: the most rows of a slot."""
            windows = self.rows.whole if cap is None else self.rows.capped
            if len(windows.lens) != padded_bs or cap not in (None, self.width):
                return upstream.RaggedVerifyLayout.padded_to_bucket(
                    self, padded_bs=padded_bs, cap=cap
                )
            return upstream.RaggedVerifyLayout(
                verify_lens=windows.lens,
                graph_num_tokens=self.graph_num_tokens,
                extend_start_loc=windows.indptr[:-1],
                qo_indptr_device=windows.indptr,
                total_verify_tokens=self.graph_num_tokens if cap is None else None,
                cap=cap,
            )

    return PaddedLayout
