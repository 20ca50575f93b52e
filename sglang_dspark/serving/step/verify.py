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

from sglang_dspark.serving.step.accept import accept as accept_windows
from sglang_dspark.serving.step.rules import Rules


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


def may_fold(worker: Any, batch: Any, proposal: Any, rules: Rules) -> bool:
    """Whether a graph that holds the greedy accept rule may decide this step."""
    from sglang.srt.speculative.dspark_components.dspark_verify import (
        verify_logits_adjustments_are_noop,
    )

    info = batch.sampling_info
    return (
        worker._verify_executor.verify_epilogue is not None
        and proposal.folded
        and rules.penalties is None
        and (info is None or info.is_all_greedy)
        and verify_logits_adjustments_are_noop(info)
        and not batch.has_grammar
    )


def verify(
    worker: Any, batch: Any, window: Any, proposal: Any, layout: Any, grammar: Any, rules: Rules
) -> Verified:
    """Run the target over the windows of `layout`; grammar: upstream's barrier, or None."""
    from sglang.srt.speculative.dspark_components.dspark_observability import InfoSegment
    from sglang.srt.speculative.spec_utils import GrammarTree, prepare_mamba_track_for_verify

    tokens = proposal.draft_block.draft_tokens
    ids = proposal.verify_ids
    if ids is None:
        ids = torch.cat([proposal.draft_block_ids[:, :1], tokens], dim=1).contiguous()
    # A tree reads the drafts: it stands in front of the pass that it has to wait beside.
    tree = GrammarTree.from_linear_chain(ids) if batch.has_grammar else None
    foldable = may_fold(worker, batch, proposal, rules)
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
            sampling_info=batch.sampling_info if rules.penalties is None else None,
            verify_window=window,
            inject_gate=foldable,
        )
    if rules.penalties is not None:
        rules.penalties.apply(done.logits_output.next_token_logits, ids, batch.seq_lens)
        _adjust(worker, batch, done.logits_output.next_token_logits)
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


def _adjust(worker: Any, batch: Any, logits: Tensor) -> None:
    """What `run_compact` does with sampling info: logit processors and biases, behind penalties."""
    from sglang.srt.speculative.dspark_components.dspark_planner import (
        apply_logits_adjustments_strided,
    )

    apply_logits_adjustments_strided(
        next_token_logits=logits,
        sampling_info=batch.sampling_info,
        verify_num_draft_tokens=worker.verify_num_draft_tokens,
    )


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
    worker: Any,
    batch: Any,
    verified: Verified,
    proposal: Any,
    layout: Any,
    draft_input: Any,
    rules: Rules,
) -> Any:
    """Upstream's `AcceptOuts`: accepted drafts, bonus tokens, new lengths, emitted tokens.

    draft_input: the batch's `spec_info` as it came; the pass puts another one there.
    """
    if rules.own_law:
        return _accept(worker, batch, verified, proposal, layout, rules)
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


def _accept(
    worker: Any, batch: Any, verified: Verified, proposal: Any, layout: Any, rules: Rules
) -> Any:
    """`AcceptOuts` by our rules; ranks agree on the outcome as they do on upstream's."""
    from sglang.srt.speculative.dspark_components.dspark_verify import build_accept_outs
    from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

    outcome = accept_windows(
        verified.ids,
        layout.verify_lens,
        verified.outputs.next_token_logits,
        proposal.draft_block,
        batch.sampling_info,
        batch.seq_lens,
        rules.seeds,
    )
    return build_accept_outs(
        correct_len=outcome.accepted,
        bonus=outcome.bonus,
        # No draft that was admitted is dropped afterwards.
        cap_trim_lens=torch.zeros_like(outcome.accepted),
        prefix_lens=batch.seq_lens,
        draft_tokens=proposal.draft_block.draft_tokens,
        gamma=int(worker.gamma),
        verify_num_draft_tokens=int(worker.verify_num_draft_tokens),
        tp_sync=worker._verify_executor._tp_sync,
        sync_site=SpecTpSyncSite.DSPARK_ACCEPT_SAMPLE,
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
