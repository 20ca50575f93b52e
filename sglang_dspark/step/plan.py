"""Call the scheduler: plan a step before any work, admit its drafts, learn from its result.

Under the overlap loop of a GPU a plan is made while the previous step computes:
sglang/srt/managers/scheduler.py calls the result of `get_confidence_budget_prepare` right before it
launches a step. On a CPU there is no such call, and `take_plan` makes the plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.schedule.budget import Counts
from sglang_dspark.step.engine_protocol import GREEDY, SAMPLED, Step, StepRequests
from sglang_dspark.step.rules import limits_of
from sglang_dspark.step.state import StepState
from sglang_dspark.step.timing import span

STEP = "dspark_step"  # attribute of upstream's result: the step that it belongs to


def plan_ahead(state: StepState, batch: Any) -> None:
    """Plan the decode step that is launched next; a prefill or an empty batch has no plan."""
    state.planned = None
    decodes = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch)
    if decodes and batch.spec_info is not None and batch.batch_size() > 0:
        state.planned = _plan(state, batch, starts=False)


def take_plan(state: StepState, batch: Any) -> Step:
    """Return the plan of the step that is launched now; without overlap it is made here."""
    step, state.planned = state.planned, None
    if step is None:
        step = _plan(state, batch, starts=True)
    else:
        state.engine.start(step)
    if step.plan.speculates and state.faults.rests():
        state.engine.skip_draft(step, failed=False)
    return step


def _plan(state: StepState, batch: Any, *, starts: bool) -> Step:
    generation = state.worker.model_runner.req_to_token_pool.req_generation
    rows = batch.req_pool_indices_cpu
    with span("plan"):
        with state.ranks.deciding():
            limits = limits_of(batch.reqs, int(state.worker.gamma))
            requests = StepRequests(rows, generation, _context(batch), limits)
            step = state.engine.begin(requests, starts=starts)
        state.ranks.send_plan(step, rows)
    step.made_up = state.end_warm_up is not None
    return step


def _context(batch: Any) -> Tensor:
    """Return context lengths, [R] on the host; with overlap those of the previous step."""
    if batch.seq_lens_cpu is not None:
        return batch.seq_lens_cpu  # type: ignore[no-any-return]
    return torch.tensor([len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs])


def regimes_of(batch: Any) -> Counts | None:
    """Return each request's regime of the calibration, [R] int64; None: all are greedy.

    Read from the requests: reading the device's mask would wait for the device.
    """
    info = batch.sampling_info
    if info is None or info.is_all_greedy:
        return None
    tops = (req.sampling_params.top_k for req in batch.reqs)
    return np.array([SAMPLED if top_k > 1 else GREEDY for top_k in tops], np.int64)


def admit(state: StepState, step: Step, batch: Any, logits: Tensor | None) -> Tensor:
    """Return indptr [R + 1] int32 on the device: request r verifies its anchor and l_r drafts.

    logits: [R, d] confidence logits of this step's drafts; None where there are none.
    """
    admitted = None
    if state.ranks.leads:
        with state.ranks.admitting(step.plan):
            step.regimes = regimes_of(batch)
            admitted = state.device.admit(state.engine, step, logits)
    return state.ranks.windows(step.plan, admitted)


def tag(result: Any, step: Step) -> Any:
    """Attach the step to its upstream result, for `learn`."""
    result.__dict__[STEP] = step
    return result


def learn(state: StepState, batch: Any, result: Any) -> None:
    """Report a step's result to the engine when it is on the host and its tokens are handed out."""
    step: Step | None = result.__dict__.get(STEP)
    accepted = result.num_correct_drafts_per_req_cpu
    if step is None or accepted is None:
        return
    lengths = result.cap_lens.numpy().astype(np.int64) - 1  # [R]
    with span("learn"):
        state.engine.landed(step, lengths, np.asarray(accepted, np.int64))
        if not step.made_up:
            state.engine.processed(batch.reqs, accepted, bool(lengths.any()))
