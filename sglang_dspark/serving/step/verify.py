"""Verify and accept: one ragged pass of the target, its masks, and the accept rule over it.

Upstream (0.5.23): sglang/srt/speculative/dspark_components/dspark_verify.py does the pass, in a
graph where one was captured, and accepts there too if every request is greedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verified:
    """outputs: logits [R * (gamma + 1), V] among them. hidden: [R * (gamma + 1), m * d].

    in_graph: a captured pass ran. folded: it accepted too.
    """

    ids: Tensor  # [R, gamma + 1] anchors and drafts
    outputs: Any
    hidden: Tensor
    in_graph: bool
    folded: bool


def may_fold(worker: Any, batch: Any, proposal: Any) -> bool:
    """Whether a graph that holds the greedy accept rule may decide this step."""
    from sglang.srt.speculative.dspark_components.dspark_verify import (
        verify_logits_adjustments_are_noop,
    )

    info = batch.sampling_info
    return (
        worker._verify_executor.verify_epilogue is not None
        and proposal.folded
        and (info is None or info.is_all_greedy)
        and verify_logits_adjustments_are_noop(info)
        and not batch.has_grammar
    )


def verify(worker: Any, batch: Any, window: Any, proposal: Any, layout: Any, grammar: Any) -> Any:
    """Run the target over the windows of `layout`; grammar: upstream's barrier, or None."""
    from sglang.srt.speculative.dspark_components.dspark_observability import InfoSegment
    from sglang.srt.speculative.spec_utils import GrammarTree, prepare_mamba_track_for_verify

    tokens = proposal.draft_block.draft_tokens
    ids = proposal.verify_ids
    if ids is None:
        ids = torch.cat([proposal.draft_block_ids[:, :1], tokens], dim=1).contiguous()
    # A tree reads the drafts: it stands in front of the pass that it has to wait beside.
    tree = GrammarTree.from_linear_chain(ids) if batch.has_grammar else None
    foldable = may_fold(worker, batch, proposal)
    prepare_mamba_track_for_verify(batch)
    executor, requests = worker._verify_executor, len(batch.seq_lens)
    with worker._observers.segment(InfoSegment.TARGET_VERIFY), _seated(executor, requests):
        done, hidden = executor.run_compact(
            batch=batch,
            layout=layout,
            draft_block_ids=proposal.draft_block_ids,
            draft_tokens=tokens,
            bs=requests,
            device=worker.device,
            sampling_info=batch.sampling_info,
            verify_window=window,
            inject_gate=foldable,
        )
    if tree is not None:
        _mask(batch, tree, done.logits_output.next_token_logits, grammar)
    in_graph = done.can_run_cuda_graph
    return Verified(ids, done.logits_output, hidden, in_graph, foldable and in_graph)


@contextmanager
def _seated(executor: Any, requests: int) -> Iterator[None]:
    """Without the graphs' accept epilogue where a batch has more requests than any of them.

    Such a pass runs eagerly, but upstream stages its lengths in the epilogue's buffers all the
    same, which raises.
    """
    epilogue = executor.verify_epilogue
    if epilogue is not None and requests > epilogue.max_bs:
        executor.verify_epilogue = None
    try:
        yield
    finally:
        executor.verify_epilogue = epilogue


def _mask(batch: Any, tree: Any, logits: Tensor, barrier: Any) -> None:
    """Leave what the requests' grammars allow of logits [R * (gamma + 1), V]."""
    from sglang.srt.speculative.spec_utils import build_grammar_vocab_mask

    mask = build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=tree,
        sampling_info=batch.sampling_info,
        device=logits.device,
        barrier=barrier,
    )
    if mask is not None:
        mask.apply(logits)


def accept(
    worker: Any, batch: Any, verified: Verified, proposal: Any, layout: Any, draft_input: Any
) -> Any:
    """Upstream's `AcceptOuts`: accepted drafts, bonus tokens, new lengths, emitted tokens.

    draft_input: the batch's `spec_info` as it came; the pass puts another one there.
    """
    return worker._verify_executor.accept_and_finalize(
        folded_accept=verified.folded,
        bs=len(batch.seq_lens),
        verify_ids_2d=verified.ids,
        target_logits=verified.outputs.next_token_logits,
        draft_block=proposal.draft_block,
        sampling_info=batch.sampling_info,
        draft_input=draft_input,
        layout=layout,
        prefix_lens=batch.seq_lens,
        draft_tokens=proposal.draft_block.draft_tokens,
    )


def explain(
    worker: Any, batch: Any, verified: Verified, proposal: Any, accepted: Any, draft_input: Any
) -> None:
    """Log-probabilities and sampling masks, where a request asks for them."""
    from sglang.srt.layers.logprob_processor import compute_spec_logprobs
    from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture

    width = worker.verify_num_draft_tokens
    capture = SpeculativeSamplingMaskCapture.from_logits(
        batch.sampling_info,
        next_token_logits=verified.outputs.next_token_logits,
        draft_input=draft_input,
        draft_token_num=width,
        bs=len(batch.seq_lens),
        greedy_mask=proposal.draft_block.greedy_mask,
    )
    if capture is not None:
        verified.outputs.sampling_mask_output = capture.build_output(
            out_tokens=accepted.out_tokens, commit_lens=accepted.commit_lens
        )
    if batch.return_logprob:
        compute_spec_logprobs(
            batch, verified.outputs, accepted.out_tokens.reshape(-1), chain_stride=width
        )
