"""One decode step, from top to bottom.

Stands for `DSparkWorkerV2._forward_decode` (sglang/srt/speculative/dspark_components/
dspark_worker_v2.py, 0.5.23) where we schedule. K is a host integer fixed before anything is
drafted; verify lengths, drafts and outcomes stay on the device until the step's result is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_dspark.serving.step import commit, draft, layout, learn, plan, verify
from sglang_dspark.serving.step.rules import rules_of
from sglang_dspark.serving.step.state import StepState


def decode(state: StepState, batch: Any, publish: Callable[..., None] | None, grammar: Any) -> Any:
    """Decode every request of the batch once; upstream's `GenerationBatchResult`.

    publish: tells the scheduler the new lengths, [R], as soon as they are launched. grammar: its
    barrier for requests with one.
    """
    worker, device, came = state.worker, state.device, batch.spec_info
    batch.seq_lens.record_stream(torch.get_device_module(worker.device).current_stream())
    worker._observers.begin_step()
    step = plan.take_plan(state, batch)
    drafts = layout.admitted_drafts(step.plan)  # K
    window = layout.window_of(worker, batch)  # [R, gamma + 1]
    rules = rules_of(worker, state.counts, batch)
    if step.plan.speculates:
        proposal = draft.propose(worker, batch, window, rules.seeds)
        logits = proposal.confidence_raw  # [R, gamma]
        state.engine.calibrate(step, plan.greedy_requests(batch))
    else:
        folded = device.accepts_in_graph(step.plan.requests, drafts)
        proposal, logits = draft.skip(worker, batch, folded=folded), None
    lengths = device.admit(step, logits)  # l_r [R]
    windows = layout.layout_of(lengths, device.pass_tokens(step.plan.requests, drafts))
    verified = verify.verify(worker, batch, window, proposal, windows, grammar, rules)
    accepted = verify.accept(worker, batch, verified, proposal, windows, came, rules)
    verify.explain(worker, batch, verified, proposal, accepted, came)
    if publish is not None:
        publish(accepted.new_seq_lens)
    if rules.penalties is not None:
        rules.penalties.count(accepted.out_tokens, accepted.commit_lens)
    commit.commit(worker, batch, window, windows, verified, accepted)
    result = commit.result_of(worker, verified, windows, accepted)
    learn.tag(result, step, None if logits is None else device.to_host(logits))
    return result
