"""Draft or skip: gamma tokens for every request, or a proposal of none.

Upstream, sglang/srt/speculative/dspark_components/dspark_draft.py, drafts in every step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving import upstream
from sglang_dspark.step.engine_protocol import Step
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.step.state import StepState

_DEVICE_FAILED = ("CUDA error", "Triton Error [CUDA]")  # how torch's and Triton's errors begin


def propose(state: StepState, batch: Any, window: Any, step: Step, seeds: Seeds | None) -> Any:
    """The `DraftProposal` of a step; of no drafts where its plan has none or drafting fails.

    A failure ends the server where there are several ranks, as what each of them drafted would
    differ, and where the device failed: nothing more can be computed on it.
    """
    if step.plan.speculates:
        try:
            proposal = state.device.draft(batch, window, step.plan.budget.depth, seeds)
        except Exception as error:
            if state.ranks.several or of_device(error):
                raise
            state.faults.failed(error)
            state.engine.leave_out_draft(step, failed=True)
        else:
            state.faults.drafted()
            return proposal
    return skip(state, batch)


def of_device(error: Exception) -> bool:
    """Whether an accelerator itself failed, not for want of memory: so does all that follows."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or str(error).startswith(_DEVICE_FAILED)


def skip(state: StepState, batch: Any) -> Any:
    """A `DraftProposal` whose drafts nobody reads, as none is verified."""
    worker, requests, device = state.worker, len(batch.seq_lens), batch.seq_lens.device
    ids = worker._proposer.draft_block_ids_view(bs=requests, device=device)
    ids[:, 0].copy_(batch.spec_info.bonus_tokens.view(-1))
    params = upstream.resolve_draft_params(
        sampling_info=batch.sampling_info, bs=requests, device=device
    )
    block = upstream.DraftBlockResult(
        draft_tokens=_no_tokens(requests, int(worker.gamma), device),
        corrected_logits=None,
        greedy_mask=params.greedy_mask,
        temperatures=params.temperatures,
        greedy_draft=True,
    )
    folded = state.device.accepts_in_graph(requests, 0)
    return upstream.DraftProposal(draft_block_ids=ids, draft_block=block, folded=folded)


@lru_cache(maxsize=512)
def _no_tokens(requests: int, gamma: int, device: torch.device) -> Tensor:
    """[R, gamma] int64; nobody writes to it."""
    return torch.zeros(requests, gamma, dtype=torch.int64, device=device)
