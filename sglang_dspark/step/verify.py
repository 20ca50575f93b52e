"""Verify: one ragged pass of the target over the admitted drafts, and the masks over its logits.

Upstream: sglang/srt/speculative/dspark_components/dspark_verify.py does the pass, in a
graph where one was captured, and accepts there too if every request is greedy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving import upstream
from sglang_dspark.step.device import Device
from sglang_dspark.step.passes import Pass, Verified
from sglang_dspark.step.rules import Rules


def asked_of(
    worker: Any,
    batch: Any,
    came: Any,
    window: Any,
    proposal: Any,
    layout: Any,
    rules: Rules,
    *,
    drafted: bool,
) -> Pass:
    """The pass over these windows; came: the batch's `spec_info`, drafted: as of `Pass`."""
    ids = proposal.verify_ids
    if ids is None:
        tokens = proposal.draft_block.draft_tokens
        ids = torch.cat([proposal.draft_block_ids[:, :1], tokens], dim=1).contiguous()
    foldable = may_fold(worker, batch, proposal, rules)
    return Pass(batch, came, window, proposal, layout, ids, drafted, foldable, rules)


def may_fold(worker: Any, batch: Any, proposal: Any, rules: Rules) -> bool:
    """Whether a graph that holds the greedy accept rule may decide this step."""
    info = batch.sampling_info
    return (
        worker._verify_executor.verify_epilogue is not None
        and proposal.folded
        and rules.penalties is None
        and (info is None or info.is_all_greedy)
        and upstream.verify_logits_adjustments_are_noop(info)
        and not batch.has_grammar
    )


def verify(device: Device, asked: Pass, grammar: Any) -> Verified:
    """Run the target over the windows; grammar: upstream's barrier, or None."""
    batch = asked.batch
    # A tree reads the drafts: it stands in front of the pass that it has to wait beside.
    tree = upstream.GrammarTree.from_linear_chain(asked.ids) if batch.has_grammar else None
    upstream.prepare_mamba_track_for_verify(batch)
    verified = device.run(asked)
    if tree is not None:
        _mask(batch, tree, verified.outputs.next_token_logits, grammar)
    return verified


def _mask(batch: Any, tree: Any, logits: Tensor, barrier: Any) -> None:
    """Leave what the requests' grammars allow of logits [R * (gamma + 1), V]."""
    mask = upstream.build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=tree,
        sampling_info=batch.sampling_info,
        device=logits.device,
        barrier=barrier,
    )
    if mask is not None:
        mask.apply(logits)


def adjust(worker: Any, batch: Any, logits: Tensor) -> None:
    """Apply logit processors and biases to logits [R * (gamma + 1), V], in place."""
    upstream.apply_logits_adjustments_strided(
        next_token_logits=logits,
        sampling_info=batch.sampling_info,
        verify_num_draft_tokens=worker.verify_num_draft_tokens,
    )


def explain(worker: Any, asked: Pass, verified: Verified, accepted: Any) -> None:
    """Log-probabilities and sampling masks, where a request asks for them."""
    batch, width = asked.batch, worker.verify_num_draft_tokens
    capture = upstream.SpeculativeSamplingMaskCapture.from_logits(
        batch.sampling_info,
        next_token_logits=verified.outputs.next_token_logits,
        draft_input=asked.came,
        draft_token_num=width,
        bs=asked.requests,
        greedy_mask=asked.proposal.draft_block.greedy_mask,
    )
    if capture is not None:
        verified.outputs.sampling_mask_output = capture.build_output(
            out_tokens=accepted.out_tokens, commit_lens=accepted.commit_lens
        )
    if batch.return_logprob:
        upstream.compute_spec_logprobs(
            batch, verified.outputs, accepted.out_tokens.reshape(-1), chain_stride=width
        )
