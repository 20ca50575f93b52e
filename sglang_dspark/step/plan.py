"""Plan: which requests come, whether to draft for them and how much to verify, before any work.

Under the overlap loop this runs while the step before it computes: sglang/srt/managers/scheduler.py
calls what `get_confidence_budget_prepare` returned right before it launches a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.step.engine import Step
from sglang_dspark.step.processors import limits_of
from sglang_dspark.step.spans import span
from sglang_dspark.step.state import StepState


def plan_ahead(state: StepState, batch: Any) -> None:
    """Plan the decode step that is launched next; a batch that prefills or is empty has none."""
    state.planned = None
    decodes = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch)
    if decodes and batch.spec_info is not None and batch.batch_size() > 0:
        state.planned = _plan(state, batch, starts=False)


def take_plan(state: StepState, batch: Any) -> Step:
    """The plan of the step that is being launched: made ahead, or now without overlap."""
    step, state.planned = state.planned, None
    if step is None:
        step = _plan(state, batch, starts=True)
    else:
        state.engine.start(step)
    if step.plan.speculates and state.faults.rests():
        state.engine.leave_out_draft(step, failed=False)
    return step


def _plan(state: StepState, batch: Any, *, starts: bool) -> Step:
    pool = state.worker.model_runner.req_to_token_pool
    rows = batch.req_pool_indices_cpu
    with span("plan"):
        with state.ranks.deciding():
            step = state.engine.begin(
                rows,
                pool.req_generation,
                _context(batch),
                starts=starts,
                limits=limits_of(batch.reqs, int(state.worker.gamma)),
            )
        state.ranks.send_plan(step, rows)
    return step


def _context(batch: Any) -> Tensor:
    """Tokens of context of each request, [R] on the host; under overlap as of the step before."""
    lens: Tensor | None = batch.seq_lens_cpu
    if lens is not None:
        return lens
    return torch.tensor([len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs])


def greedy_requests(batch: Any) -> Tensor | None:
    """[R] bool on the host, requests that take the likeliest token; None: all of them.

    Read from the requests themselves: the device's mask of them would have to be waited for.
    """
    info = batch.sampling_info
    if info is None or info.is_all_greedy:
        return None
    return torch.tensor([req.sampling_params.top_k <= 1 for req in batch.reqs])
