"""Decode one token per request, in a step without drafts, without upstream's worker.

Replaces `step/decode.py` for such a step. All its stages plan windows of gamma + 1 places, make a
proposal, pack it, and spread the result: about forty small tensor operations, each of them cold
after a pass over the model's weights. Here one token of each request is in the same ragged
verify pass, the accept rule sees one row each, and the features wait with the context rows. Tokens,
lengths, metrics and the draft's context are the same.

`require_worker` checks a worker once, `supports_batch` every batch. All others use all stages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.accept import accept, agreed
from sglang_dspark.backends.cpu.context_kv import Committed
from sglang_dspark.backends.cpu.fast_paths import require
from sglang_dspark.backends.cpu.ragged_layout import layout_of
from sglang_dspark.backends.cpu.verify_forward import verify_forward
from sglang_dspark.serving import upstream
from sglang_dspark.step.penalties import is_penalised
from sglang_dspark.step.seeds import seeds_of


def require_worker(worker: Any) -> None:
    """Require that no feature changes decode steps, of those that `step.build.obstacle` allows.

    Raises UnsupportedError where one does.
    """
    runner = worker.model_runner
    require(not runner.model_config.is_multimodal, "the target is multimodal")
    require(not worker._need_mamba_verify_commit, "the target keeps a recurrent state")
    require(runner.decode_cuda_graph_runner is None, "decoding runs in graphs")
    require(not runner.kv_index_translator.reads_are_translated, "cache slots are translated")


def supports_batch(batch: Any) -> bool:
    """Return whether a batch reads only one unmodified row of logits per request."""
    return (
        batch.forward_mode.is_decode()
        and batch.return_hidden_states_mode is upstream.CaptureHiddenMode.NULL
        and not reads_windows(batch)
    )


def reads_windows(batch: Any) -> bool:
    """Return whether a feature reads logits window by window, gamma + 1 rows per request."""
    info = batch.sampling_info
    if batch.has_grammar or batch.return_logprob:
        return True
    if info is None:
        return False
    if info.sampling_mask_batch_indices is not None or any(map(is_penalised, batch.reqs)):
        return True
    return not upstream.verify_logits_adjustments_are_noop(info)


def run(
    worker: Any,
    batch: Any,
    publish: Callable[..., None] | None,
    write_context: Callable[[Committed], None],
) -> Any:
    """Decode one token of each request; return upstream's `GenerationBatchResult` of a step.

    write_context: writes or defers the features of the tokens for later drafts.
    """
    requests, prefix = len(batch.seq_lens), batch.seq_lens
    anchors = batch.spec_info.bonus_tokens.view(-1)
    table = worker.model_runner.req_to_token_pool.req_to_token
    slots = table[batch.req_pool_indices, prefix].to(torch.int64)  # of each next token, [R]
    window = upstream.RaggedVerifyWindow(
        positions=prefix, verify_cache_loc=slots, verify_ids=anchors, window_index=None
    )
    layout, width = layout_of((0,) * requests), int(worker.verify_num_draft_tokens)
    output = verify_forward(worker, batch, layout, window)
    tokens = agreed(_next_tokens(output.next_token_logits, anchors, batch), worker._tp_sync)
    one, lens = _windows(requests)[0], prefix + 1
    if publish is not None:
        publish(lens)
    write_context(
        Committed(batch.req_pool_indices, one, anchors, prefix, slots, output.hidden_states)
    )
    output.hidden_states = None
    padded = torch.zeros(requests, width, dtype=torch.int64)
    padded[:, 0] = tokens
    return upstream.GenerationBatchResult(
        logits_output=output,
        next_token_ids=padded.view(-1),
        accept_lens=one,
        block_accept_lens=one,
        cap_lens=layout.verify_lens,
        can_run_cuda_graph=False,
        next_draft_input=upstream.make_draft_input_v2(bonus_tokens=tokens, new_seq_lens=lens),
        speculative_num_draft_tokens=width,
        new_seq_lens=lens,
    )


def _next_tokens(logits: Tensor, anchors: Tensor, batch: Any) -> Tensor:
    """Choose each request's next token, [R] int64, from the target's logits [R, V]."""
    requests, info = len(anchors), batch.sampling_info
    mask, seeds = None, None
    if info is not None and not info.is_all_greedy:
        mask = upstream.resolve_greedy_mask(sampling_info=info, bs=requests, device=logits.device)
        seeds = seeds_of(batch)
    block = SimpleNamespace(greedy_draft=True, greedy_mask=mask)
    window = anchors.view(requests, 1)
    return accept(window, *_windows(requests)[1:], logits, block, info, batch.seq_lens, seeds)[1]


@lru_cache(maxsize=512)
def _windows(requests: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return lengths 1, [R] int32 and int64, and first rows of windows without drafts."""
    one = torch.ones(requests, dtype=torch.int32)
    return one, one.long(), torch.arange(requests)
