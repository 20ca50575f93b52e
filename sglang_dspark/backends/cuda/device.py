"""Implement `step.device.Device` on an accelerator: the host reads nothing before the result."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import msgspec
import torch
from torch import Tensor

from sglang_dspark.backends.cuda import graph_epilogue
from sglang_dspark.backends.cuda.accept import StepAccept
from sglang_dspark.backends.cuda.accept_plain import (
    plain_tokens,
    samples_anchors,
    samples_as_plain,
)
from sglang_dspark.backends.cuda.chain_context import context_of
from sglang_dspark.backends.cuda.commit import ContextRows
from sglang_dspark.backends.cuda.compact_pass import compact_pass, strided
from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.kernels.admission import admit_torch, admit_triton, terms_of
from sglang_dspark.kernels.certainty import certainty_triton
from sglang_dspark.kernels.pass_rows import PassRows
from sglang_dspark.kernels.penalise import penalise_triton
from sglang_dspark.kernels.platform import runs_on
from sglang_dspark.serving import mode, upstream
from sglang_dspark.step.engine_protocol import Engine, Step
from sglang_dspark.step.penalties import StepPenalties
from sglang_dspark.step.rules import Cuts
from sglang_dspark.step.seeds import Seeds, seeded_draft
from sglang_dspark.step.timing import Clock
from sglang_dspark.step.verify import (
    VerifyInput,
    VerifyOutput,
    adjust,
    admitted_drafts,
    anchors_alone,
    layout_of,
)
from sglang_dspark.verify.acceptance import Acceptance

WindowArguments = tuple[Tensor, Tensor, Tensor, Any, Any, Tensor, Seeds | None]
_LEAD = 10_000_000  # cycles: at least 5 ms, more than the launches of a pass need


class EventClock:
    """Time on the stream that computes; events are read when they have passed."""

    def mark(self) -> torch.cuda.Event:
        """Record an event after all work launched so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Return the seconds between two events; None while `end` has not passed."""
        return begin.elapsed_time(end) / 1e3 if end.query() else None

    def lead(self) -> None:
        """Wait some milliseconds on the stream that computes."""
        torch.cuda._sleep(_LEAD)


class GraphDevice:
    """Admit on the device and pad passes to the tiers of the captured graphs."""

    def __init__(self, worker: Any, clock: Clock) -> None:
        """Run the steps of upstream's `worker`, whose graphs are captured."""
        self.clock = clock
        self._device = torch.device(worker.device)
        self.tiers: Sequence[int] = (
            upstream.ragged_capture_num_tokens(model_runner=worker.model_runner) or ()
        )
        self.slots = upstream.ragged_capture_max_slots(model_runner=worker.model_runner) or 0
        self._worker, self._executor = worker, worker._verify_executor
        self._epilogue = self._executor.verify_epilogue is not None
        self._estimates = mode.estimates_confidence(
            has_head=worker.draft_model.confidence_head is not None
        )
        self._by_our_rule = StepAccept()
        self.committer = graph_epilogue.committer_of(worker)
        self._chain = context_of(worker)

    def plain_step(self, batch: Any, publish: Callable[..., None] | None) -> Any | None:
        """Return None: a captured graph is the fast path."""
        return None

    def admit(self, engine: Engine, step: Step, logits: Tensor | None) -> Tensor:
        """Return indptr [R + 1] int32 by the logits [R, gamma] of this step and the plan's K."""
        plan = step.plan
        if logits is None or not plan.speculates:
            return anchors_alone(plan.requests, self._device)
        step.arriving = to_host(logits)
        slopes, shifts = engine.calibrate(step)
        terms = terms_of(slopes, shifts, plan.limits, plan.weights, plan.floors)
        admit = admit_triton if runs_on(self._device) else admit_torch
        return admit(logits, self._upload(terms), admitted_drafts(plan))

    def pass_tokens(self, requests: int, admitted: int) -> int:
        """Return the smallest tier of at least R + K; without one, R + K: the pass runs eagerly."""
        tokens = requests + admitted
        return (
            self.tiers[bisect_left(self.tiers, tokens)]
            if self.in_graph(requests, admitted)
            else tokens
        )

    def accepts_in_graph(self, requests: int, admitted: int) -> bool:
        """Return whether a graph with upstream's accept epilogue was captured for such a pass."""
        return self._epilogue and self.in_graph(requests, admitted)

    def in_graph(self, requests: int, admitted: int) -> bool:
        """Return whether a graph was captured for such a pass."""
        tokens = requests + admitted
        return bool(self.tiers) and tokens <= self.tiers[-1] and requests <= self.slots

    def begin_prefill(self, batch: Any) -> None:
        """Record a prefill for a chain drafter; a block drafter's context needs only features."""
        if self._chain is not None:
            self._chain.begin_prefill(batch)

    def draft(self, batch: Any, window: Any, depth: int, seeds: Seeds | None) -> Any:
        """Draft by SGLang's proposer, in a graph where one was captured; depth is always gamma."""
        worker, proposer = self._worker, self._worker._proposer
        segment = worker._observers.segment(upstream.InfoSegment.DRAFT)
        with worker._draft_context(), segment, seeded_draft(proposer, batch, seeds):
            proposal = proposer.propose(
                batch=batch,
                draft_input=batch.spec_info,
                verify_window=window,
                bs=len(batch.seq_lens),
                device=worker.device,
                target_model=worker.target_worker.model_runner.model,
                sampling_info=batch.sampling_info,
            )
            return self.with_confidence(proposal)

    def with_confidence(self, proposal: Any) -> Any:
        """Return upstream's `DraftProposal` with estimated confidence if the drafter has no head.

        Computed from the logits that the drafts were drawn from. A graph overwrites them in the
        next step, so this runs after the graph on the same stream.
        """
        if not self._estimates:
            return proposal
        block = proposal.draft_block
        temperatures = block.temperatures.reshape(-1).where(~block.greedy_mask, 0.0)  # [R]
        estimate = certainty_triton if runs_on(self._device) else draft_confidence
        estimated = estimate(block.corrected_logits, temperatures)
        return msgspec.structs.replace(proposal, confidence_raw=estimated)

    def layout(self, step: Step, indptr: Tensor) -> Any:
        """Make the layout, padded to a tier; its lengths stay on the device."""
        admitted = admitted_drafts(step.plan)
        return layout_of(indptr, self.pass_tokens(step.plan.requests, admitted))

    def run(self, asked: VerifyInput) -> VerifyOutput:
        """Run upstream's compact pass: in a graph, or eagerly where none was captured."""
        executor, batch, penalties = self._executor, asked.batch, asked.rules.penalties
        verifying = self._worker._observers.segment(upstream.InfoSegment.TARGET_VERIFY)
        with verifying, _seated(executor, asked.requests):
            adjusted = batch.sampling_info if penalties is None else None
            alone = samples_anchors(asked)
            done = compact_pass(self._worker, asked, self.slots, adjusted, anchors=alone)
        if penalties is not None:
            logits = done.outputs.next_token_logits
            self.penalise(penalties, logits, asked.read_ids, batch.seq_lens)
            adjust(self._worker, batch, logits)
        folded = asked.foldable and done.in_graph
        return VerifyOutput(done.outputs, done.hidden, done.in_graph, folded, done.rows)

    def penalise(self, penalties: StepPenalties, logits: Tensor, ids: Tensor, lens: Tensor) -> None:
        """Penalise logits of windows in place, in one launch where Triton runs."""
        launch = penalise_triton if runs_on(self._device) else None
        penalties.apply(logits, ids, lens, launch)

    def accept(self, asked: VerifyInput, verified: VerifyOutput) -> Any:
        """Return `AcceptOuts` by the fastest rule that has plain decoding's distribution.

        Greedy: SGLang's rule, in the graph where one accepted. Each request with a top-k of at most
        2,048: our rule, on lists of tokens. Without drafts: plain decoding's sampler, or our rule.
        With drafts: SGLang's rule where it is lossless, else ours.
        """
        info, rules = asked.batch.sampling_info, asked.rules
        if rules.cuts is None:
            return self._by_upstream(asked, verified, info)
        if rules.cuts.listed is None:
            if not asked.drafted and samples_as_plain(info, rules):
                return self._finalized(asked, self._plain(asked, verified))
            if asked.drafted and not rules.own_rule:
                return self._by_upstream(asked, verified, sampled_alone(info, rules.cuts))
        step, rows = self._windows(asked, verified), asked.layout.graph_num_tokens
        return self._finalized(asked, self._by_our_rule(*step, cuts=rules.cuts, rows=rows))

    def _by_upstream(self, asked: VerifyInput, verified: VerifyOutput, sampling_info: Any) -> Any:
        return self._executor.accept_and_finalize(
            folded_accept=verified.folded,
            bs=asked.requests,
            verify_ids_2d=asked.ids,
            target_logits=verified.outputs.next_token_logits,
            draft_block=asked.proposal.draft_block,
            sampling_info=sampling_info,
            draft_input=asked.draft_input,
            layout=asked.layout,
            prefix_lens=asked.batch.seq_lens,
            draft_tokens=asked.proposal.draft_block.draft_tokens,
        )

    def _plain(self, asked: VerifyInput, verified: VerifyOutput) -> Acceptance:
        sampler, logits = self._worker.model_runner.sampler, verified.outputs.next_token_logits
        width = len(logits) // asked.requests
        bonus = plain_tokens(sampler, logits, width, asked.batch, asked.rules)
        return Acceptance(accepted=torch.zeros_like(bonus), bonus=bonus)

    def _windows(self, asked: VerifyInput, verified: VerifyOutput) -> WindowArguments:
        """Return the arguments of `step.accept.accept`."""
        return (
            asked.ids,
            asked.layout.verify_lens,
            verified.outputs.next_token_logits,
            asked.proposal.draft_block,
            asked.batch.sampling_info,
            asked.batch.seq_lens,
            asked.rules.seeds,
        )

    def _finalized(self, asked: VerifyInput, outcome: Acceptance) -> Any:
        """Return `AcceptOuts`; ranks agree on our outcome as they do on upstream's."""
        return upstream.build_accept_outs(
            correct_len=outcome.accepted,
            bonus=outcome.bonus,
            # No admitted draft is dropped afterwards.
            cap_trim_lens=torch.zeros_like(outcome.accepted),
            prefix_lens=asked.batch.seq_lens,
            draft_tokens=asked.proposal.draft_block.draft_tokens,
            gamma=int(self._worker.gamma),
            verify_num_draft_tokens=int(self._worker.verify_num_draft_tokens),
            tp_sync=self._executor._tp_sync,
            sync_site=upstream.SpecTpSyncSite.DSPARK_ACCEPT_SAMPLE,
        )

    def commit(self, asked: VerifyInput, verified: VerifyOutput, accepted: Any) -> None:
        """Write the rows of every step, with or without drafts, unless a graph wrote them.

        Also store the states of recurrent layers behind the last accepted tokens.
        """
        self._worker._commit_target_mamba_states_after_verify(  # returns at once without any
            batch=asked.batch,
            seq_lens_pre_verify=asked.batch.seq_lens,
            seq_lens_post_verify=accepted.new_seq_lens,
            commit_lens=accepted.commit_lens,
        )
        if asked.rules.penalties is not None:
            asked.rules.penalties.count(accepted.out_tokens, accepted.commit_lens)
        if verified.in_graph and graph_epilogue.commits(self._executor.verify_epilogue):
            return
        hidden = verified.hidden
        assert hidden is not None, "upstream captures hidden states for every verify pass"
        if self.committer.is_latent:
            if not verified.folded:  # its graphs commit if they accept
                self._commit_latent(asked, verified, hidden, accepted)
            return
        slots = self._worker._kv_injector.ids_for(
            asked.window.kv_loc_plan, cols=verified.rows.places
        )
        self.write_context(
            asked.batch, verified.rows, slots, hidden, asked.layout, accepted.commit_lens
        )

    def write_context(
        self, batch: Any, rows: PassRows, slots: Tensor, hidden: Tensor, layout: Any, counts: Tensor
    ) -> None:
        """Write a pass's rows outside of its graph; arguments as for `ChainContext.commit`."""
        if self._chain is None:
            self.committer.write(ContextRows(hidden, rows.positions, slots))
        else:
            windows, owners = layout.qo_indptr_device, batch.req_pool_indices
            self._chain.commit(rows, slots, hidden, windows, counts, owners)

    def _commit_latent(
        self, asked: VerifyInput, verified: VerifyOutput, hidden: Tensor, accepted: Any
    ) -> None:
        self._executor.commit_hidden(
            batch=asked.batch,
            layout=asked.layout,
            hidden_strided=strided(hidden, asked.layout, asked.ids.shape[1]),
            verify_window=asked.window,
            logits_output=verified.outputs,
            commit_lens=accepted.commit_lens,
            bs=asked.requests,
            run_compact=True,
        )

    def _upload(self, host: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


def sampled_alone(sampling_info: Any, cuts: Cuts) -> Any:
    """Copy SGLang's sampling info as if greedy requests had no cuts.

    Their top-k is 1, and a flag of the batch records it: SGLang would cut all rows by sorting. Its
    greedy rule replaces the sampled outcome of these rows.
    """
    view = copy(sampling_info)
    view.need_top_k_sampling, view.need_top_p_sampling = cuts.top_k, cuts.top_p
    return view


@contextmanager
def _seated(executor: Any, requests: int) -> Iterator[None]:
    """Disable the graphs' accept epilogue for a batch with more requests than any graph.

    Such a pass runs eagerly, but upstream still stages its lengths in the epilogue's buffers,
    which raises.
    """
    epilogue = executor.verify_epilogue
    if epilogue is not None and requests > epilogue.max_bs:
        executor.verify_epilogue = None
    try:
        yield
    finally:
        executor.verify_epilogue = epilogue


def to_host(values: Tensor) -> Tensor:
    """Copy to pinned memory; the copy is complete when the step's result is.

    Clones first: a captured graph writes to the same tensor in the next step.
    """
    return upstream.async_d2h(values.detach().clone())
