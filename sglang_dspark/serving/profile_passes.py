"""Run passes of the real models over dummy requests, to time them before the first request.

Every pass is like one of a decode step (sglang/srt/speculative/dspark_components/
{dspark_draft,dspark_verify}.py): a draft block, or a ragged verify pass followed by the context
injection, of one token a request on a CPU and of all rows on a GPU. The requests have the first
pool rows, which are set to slots of the whole cache and restored afterwards. Nothing is
allocated, and the passes write only to free slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving import upstream

_STRIDE = 7919  # a prime: rows next to each other get distant tokens


class DummyBatches:
    """Make batches of dummy requests that have pool rows during a pass."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._gamma = int(worker.gamma)
        self._runner = worker.model_runner
        self._pool = worker.model_runner.req_to_token_pool

    @property
    def most_requests(self) -> int:
        """Return the number of requests that fit the pool; row 0 is padding."""
        return int(self._pool.req_to_token.shape[0]) - 1

    @property
    def longest(self) -> int:
        """Return the longest context that still fits a window after it."""
        slots = int(self._runner.token_to_kv_pool.size)
        return min(int(self._pool.req_to_token.shape[1]), slots) - self._gamma - 1

    @contextmanager
    def batch(self, requests: int, context: int) -> Iterator[Any]:
        """Make a batch of `requests` dummy requests with `context` tokens each."""
        table = self._pool.req_to_token
        width = context + self._gamma + 1
        kept = table[1 : requests + 1, :width].clone()
        size = int(self._runner.token_to_kv_pool.size)
        slots = torch.arange(requests * width, device=table.device).remainder(size) + 1
        table[1 : requests + 1, :width] = slots.view(requests, width).to(table.dtype)
        try:
            with torch.no_grad():
                yield self._batch(requests, context)
        finally:
            table[1 : requests + 1, :width] = kept

    def _batch(self, requests: int, context: int) -> Any:
        device = self._worker.device
        host = torch.full((requests,), context, dtype=torch.int64)
        needed = self._runner.attn_backend.needs_cpu_seq_lens and device != "cpu"
        batch = SimpleNamespace(
            req_pool_indices=torch.arange(1, requests + 1, device=device),
            seq_lens=host.to(device),
            seq_lens_cpu=host if needed else None,
            can_run_decode_cuda_graph=True,
            is_extend_in_batch=False,
            dp_spec_prefill_coordination_applied=False,
            global_num_tokens=None,
            input_embeds=None,
            sampling_info=None,
            spec_info=SimpleNamespace(
                bonus_tokens=made_up_tokens(self._worker, requests, 1)[:, 0],
                nxt_kv_lens_cpu=None,
            ),
        )
        batch.window = upstream.alloc_verify_window(
            batch=batch,
            bs=requests,
            device=device,
            verify_num_draft_tokens=self._gamma + 1,
            block_pos_offsets=self._worker._block_pos_offsets,
            model_runner=self._runner,
            seq_lens_cpu=batch.seq_lens_cpu,
        )
        return batch


def made_up_tokens(worker: Any, requests: int, width: int) -> Tensor:
    """Return tokens [R, width] int64 that differ: a mixture of experts routes equal rows alike, and
    a pass would read the experts of one row."""
    vocab = int(worker.model_runner.model_config.vocab_size)
    tokens = torch.arange(1, requests * width + 1, device=worker.device) * _STRIDE % vocab
    return tokens.view(requests, width)


def draft_once(worker: Any, proposer: Any, batch: Any) -> Any:
    """Draft for a dummy batch to the proposer's depth; return a `DraftProposal`."""
    requests = len(batch.seq_lens)
    # As in a step's draft: with tensor parallelism the draft's ranks may differ from the target's.
    with worker._draft_context():
        return proposer.propose(
            batch=batch,
            draft_input=batch.spec_info,
            verify_window=batch.window,
            bs=requests,
            device=worker.device,
            target_model=worker.target_worker.model_runner.model,
            sampling_info=batch.sampling_info,
        )


def ragged_forward(worker: Any, batch: Any, layout: Any, window: Any) -> Any:
    """Run the target over the packed rows of `window`; return a `LogitsProcessorOutput`."""
    host_lens, ids = batch.seq_lens_cpu, window.verify_ids
    verify_input = upstream.DFlashVerifyInput(
        draft_token=ids,
        positions=window.positions,
        draft_token_num=int(worker.verify_num_draft_tokens),
        capture_hidden_mode=upstream.CaptureHiddenMode.FULL,
        ragged_verify_layout=layout,
    )
    forward = upstream.ForwardBatch(
        forward_mode=upstream.ForwardMode.TARGET_VERIFY,
        batch_size=len(batch.seq_lens),
        input_ids=ids,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        out_cache_loc=window.verify_cache_loc,
        seq_lens_sum=None if host_lens is None else int(host_lens.sum()),
        seq_lens_cpu=host_lens,
        positions=window.positions,
        spec_algorithm=upstream.SpeculativeAlgorithm.DSPARK,
        spec_info=verify_input,
        capture_hidden_mode=upstream.CaptureHiddenMode.FULL,
        global_num_token_non_padded_cpu=len(ids),
    )
    if worker.model_runner.model_config.model_is_mrope:
        forward.mrope_positions = window.positions.to(torch.int64).expand(3, -1)
    return _forwarded(worker, batch, window, forward)


def _forwarded(worker: Any, batch: Any, window: Any, forward: Any) -> Any:
    """Run the pass, in a graph if one was captured for it."""
    runner = worker.model_runner
    batch.window.kv_loc_plan.bind(forward, runner.kv_index_translator, cols=window.window_index)
    graphs = runner.decode_cuda_graph_runner
    if graphs is not None and graphs.can_run_graph(forward):
        graphs.load_batch(forward)
    else:
        runner.attn_backend.init_forward_metadata(forward)
    forward.mark_forward_metadata_ready()
    return worker.target_worker.forward_batch_generation(
        batch=None, forward_batch=forward, is_verify=True
    ).logits_output
