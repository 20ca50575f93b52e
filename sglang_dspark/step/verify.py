"""Verify: one ragged pass of the target over the admitted drafts, and the masks over its logits.

The stages, and ranks, exchange the windows as indptr [R + 1] int32: request r has the rows
indptr[r] to indptr[r + 1] of the packed pass, its anchor and l_r drafts.

Upstream: sglang/srt/speculative/dspark_components/dspark_verify.py runs the pass, in a
captured graph where there is one, and accepts in it if every request is greedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dspark.schedule.plan import Plan
from sglang_dspark.serving import upstream
from sglang_dspark.step.rules import Rules

if TYPE_CHECKING:
    from sglang_dspark.step.device import Device


@dataclass(frozen=True)
class VerifyInput:
    """Input of a verify pass: a step's batch with its drafts, windows and layout.

    Types are upstream's where we have none. draft_input: the batch's `spec_info` before the pass,
    which replaces it. drafted: any draft may be verified. foldable: a graph may accept in the pass.
    rules: sampling rules that the device adds to upstream's.
    """

    batch: Any
    draft_input: Any
    window: Any  # positions and cache slots [R, gamma + 1]
    proposal: Any  # drafts [R, gamma]
    layout: Any
    ids: Tensor  # [R, gamma + 1] anchors and drafts
    drafted: bool
    foldable: bool
    rules: Rules

    @property
    def requests(self) -> int:
        """Return R."""
        return len(self.batch.seq_lens)

    @property
    def read_ids(self) -> Tensor:
        """Return the tokens whose rows may be accepted: [R, 1], the anchors, without drafts."""
        return self.ids if self.drafted else self.ids[:, :1]


@dataclass(frozen=True)
class VerifyOutput:
    """Output of a verify pass.

    outputs: upstream's, its logits [R * (gamma + 1), V] or [rows, V]. hidden: [rows, m * d].
    in_graph: a captured pass ran. folded: it accepted too. rows: the device's packing of the pass.
    """

    outputs: Any
    hidden: Tensor | None
    in_graph: bool = False
    folded: bool = False
    rows: Any = None


def admitted_drafts(plan: Plan) -> int:
    """Return K: the budget, or all drafts that the limits allow."""
    if not plan.speculates:
        return 0
    return min(plan.budget.drafts, int(plan.limits.sum()))


def anchors_alone(requests: int, device: torch.device | str = "cpu") -> Tensor:
    """Return indptr of windows without drafts."""
    return torch.arange(requests + 1, dtype=torch.int32, device=device)


def layout_of(indptr: Tensor, tokens: int) -> Any:
    """Make upstream's `RaggedVerifyLayout` of these windows in a GPU pass of `tokens` rows."""
    return upstream.RaggedVerifyLayout(
        verify_lens=indptr.diff(),
        graph_num_tokens=tokens,
        extend_start_loc=indptr[:-1],
        qo_indptr_device=indptr,
    )


def window_of(worker: Any, batch: Any) -> Any:
    """Allocate positions and cache slots of each request's gamma + 1 tokens: [R, gamma + 1]."""
    host_lens = batch.seq_lens_cpu
    return upstream.alloc_verify_window(
        batch=batch,
        bs=len(batch.seq_lens),
        device=worker.device,
        verify_num_draft_tokens=worker.verify_num_draft_tokens,
        block_pos_offsets=worker._block_pos_offsets,
        model_runner=worker.model_runner,
        seq_lens_cpu=host_lens if host_lens is not None else batch.spec_info.nxt_kv_lens_cpu,
    )


def window_ids(proposal: Any) -> Tensor:
    """Return anchors and drafts of upstream's `DraftProposal`, [R, gamma + 1] int64."""
    ids: Tensor | None = proposal.verify_ids
    if ids is not None:
        return ids
    return torch.cat([proposal.draft_block_ids[:, :1], proposal.draft_block.draft_tokens], dim=1)


def may_fold(worker: Any, batch: Any, proposal: Any, rules: Rules) -> bool:
    """Return whether a graph that contains the greedy accept rule may accept in this step."""
    info = batch.sampling_info
    return (
        worker._verify_executor.verify_epilogue is not None
        and proposal.folded
        and rules.penalties is None
        and (info is None or info.is_all_greedy)
        and upstream.verify_logits_adjustments_are_noop(info)
        and not batch.has_grammar
    )


def verify(device: Device, inputs: VerifyInput, grammar: Any) -> VerifyOutput:
    """Run the target over the windows; grammar: upstream's barrier, or None."""
    batch = inputs.batch
    # Built before the launch: the tree reads the drafts back, and would wait for the pass.
    tree = upstream.GrammarTree.from_linear_chain(inputs.ids) if batch.has_grammar else None
    upstream.prepare_mamba_track_for_verify(batch)
    verified = device.run(inputs)
    if tree is not None:
        logits = verified.outputs.next_token_logits  # [R * (gamma + 1), V]
        mask = upstream.build_grammar_vocab_mask(
            reqs=batch.reqs, tree=tree, sampling_info=batch.sampling_info, device=logits.device,
            barrier=grammar,
        )  # fmt: skip
        if mask is not None:
            mask.apply(logits)
    return verified


def adjust(worker: Any, batch: Any, logits: Tensor) -> None:
    """Apply logit processors and biases to logits [R * (gamma + 1), V], in place."""
    upstream.apply_logits_adjustments_strided(
        next_token_logits=logits,
        sampling_info=batch.sampling_info,
        verify_num_draft_tokens=worker.verify_num_draft_tokens,
    )


def fill_logprobs(worker: Any, inputs: VerifyInput, verified: VerifyOutput, accepted: Any) -> None:
    """Add log-probabilities and sampling masks to the output, for requests that ask for them."""
    batch, width = inputs.batch, worker.verify_num_draft_tokens
    capture = upstream.SpeculativeSamplingMaskCapture.from_logits(
        batch.sampling_info,
        next_token_logits=verified.outputs.next_token_logits,
        draft_input=inputs.draft_input,
        draft_token_num=width,
        bs=inputs.requests,
        greedy_mask=inputs.proposal.draft_block.greedy_mask,
    )
    if capture is not None:
        verified.outputs.sampling_mask_output = capture.build_output(
            out_tokens=accepted.out_tokens, commit_lens=accepted.commit_lens
        )
    if batch.return_logprob:
        upstream.compute_spec_logprobs(
            batch, verified.outputs, accepted.out_tokens.reshape(-1), chain_stride=width
        )
