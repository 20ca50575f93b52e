"""Run one decode step, from top to bottom, on any device.

Replaces `DSparkWorkerV2._forward_decode` (sglang/srt/speculative/dspark_components/
dspark_worker_v2.py) where we schedule. K is a host integer fixed before drafting, except
with `algorithm: early-stop` and `threshold`. On an accelerator verify lengths, drafts and outcomes
stay there until the host reads the step's result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_dspark.serving import upstream
from sglang_dspark.step import draft, plan, verify
from sglang_dspark.step.rules import rules_of
from sglang_dspark.step.state import StepState
from sglang_dspark.step.timing import span
from sglang_dspark.step.verify import VerifyInput, VerifyOutput


def decode(state: StepState, batch: Any, publish: Callable[..., None] | None, grammar: Any) -> Any:
    """Decode every request of the batch once; return upstream's `GenerationBatchResult`.

    publish: passes new lengths [R] to the scheduler as soon as they are launched. grammar: the
    barrier of requests with one, or None.
    """
    with span("step"):
        return _launch(state, batch, publish, grammar)


def _launch(state: StepState, batch: Any, publish: Callable[..., None] | None, grammar: Any) -> Any:
    worker, device, draft_input = state.worker, state.device, batch.spec_info
    step = plan.take_plan(state, batch)
    if not step.plan.speculates:
        result = device.plain_step(batch, publish)
        if result is not None:
            return plan.tag(result, step)
    batch.seq_lens.record_stream(torch.get_device_module(worker.device).current_stream())
    worker._observers.begin_step()
    window = verify.window_of(worker, batch)  # [R, gamma + 1]
    rules = rules_of(worker, state.counts, batch)
    with span("draft"):
        proposal = draft.propose(state, batch, window, step, rules.seeds)
    with span("admit"):
        indptr = plan.admit(state, step, batch, proposal.confidence_raw)  # [R + 1]
    layout, ids = device.layout(step, indptr), verify.window_ids(proposal)
    inputs = VerifyInput(
        batch, draft_input, window, proposal, layout, ids, drafted=step.plan.speculates,
        foldable=verify.may_fold(worker, batch, proposal, rules), rules=rules,
    )  # fmt: skip
    with span("verify"):
        verified = verify.verify(device, inputs, grammar)
    with span("accept"):
        accepted = device.accept(inputs, verified)
    verify.fill_logprobs(worker, inputs, verified, accepted)
    if publish is not None:
        publish(accepted.new_seq_lens)
    with span("commit"):
        device.commit(inputs, verified, accepted)
    verified.outputs.hidden_states = None
    return plan.tag(result_of(worker, inputs, verified, accepted), step)


def result_of(worker: Any, inputs: VerifyInput, verified: VerifyOutput, accepted: Any) -> Any:
    """Return upstream's `GenerationBatchResult` of a decode step."""
    results = (accepted.new_seq_lens, accepted.out_tokens, accepted.commit_lens)
    if verified.folded:
        # They are the graph's own buffers, which the next replay overwrites: lengths are read after
        # it, and tokens and counts are copied to the host on a stream that it does not wait for.
        results = tuple(each.clone() for each in results)
    lens, tokens, counts = results
    return upstream.GenerationBatchResult(
        logits_output=verified.outputs,
        next_token_ids=tokens.reshape(-1),
        accept_lens=counts,
        block_accept_lens=worker._block_accept_lens(
            accept=accepted, folded_accept=verified.folded, bs=inputs.requests
        ),
        cap_lens=inputs.layout.verify_lens.to(torch.int32),
        can_run_cuda_graph=verified.in_graph,
        next_draft_input=upstream.make_next_draft_input(
            bonus_tokens=accepted.bonus, new_seq_lens=lens
        ),
        speculative_num_draft_tokens=int(worker.verify_num_draft_tokens),
        new_seq_lens=lens,
    )
