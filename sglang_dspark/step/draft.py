"""Draft or skip: gamma tokens for every request, or an empty proposal.

Upstream, sglang/srt/speculative/dspark_components/dspark_draft.py, drafts in every step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving import upstream
from sglang_dspark.step.engine_protocol import Step
from sglang_dspark.step.seeds import Seeds, draft_result
from sglang_dspark.step.state import StepState

_DEVICE_FAILED = ("CUDA error", "Triton Error [CUDA]")  # how torch's and Triton's errors begin


def propose(state: StepState, batch: Any, window: Any, step: Step, seeds: Seeds | None) -> Any:
    """Return the `DraftProposal` of a step; without drafts if its plan has none or drafting fails.

    Raises the drafter's error, which ends the server, with several ranks, as their drafts would
    differ, and if the device failed, as no later call can succeed.
    """
    if step.plan.speculates:
        try:
            proposal = state.device.draft(batch, window, step.plan.budget.depth, seeds)
        except Exception as error:
            if state.ranks.several or of_device(error):
                raise
            state.faults.failed(error)
            state.engine.skip_draft(step, failed=True)
        else:
            state.faults.drafted()
            return proposal
    return skip(state, batch)


def of_device(error: Exception) -> bool:
    """Return whether the accelerator failed, other than by lack of memory: all later calls fail."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or str(error).startswith(_DEVICE_FAILED)


def skip(state: StepState, batch: Any) -> Any:
    """Return a `DraftProposal` whose drafts are never read, as none is verified."""
    worker, requests, device = state.worker, len(batch.seq_lens), batch.seq_lens.device
    ids = worker._proposer.draft_block_ids_view(bs=requests, device=device)
    ids[:, 0].copy_(batch.spec_info.bonus_tokens.view(-1))
    params = upstream.resolve_draft_params(
        sampling_info=batch.sampling_info, bs=requests, device=device
    )
    block = draft_result(_no_tokens(requests, int(worker.gamma), device), params)
    folded = state.device.accepts_in_graph(requests, 0)
    return upstream.DraftProposal(draft_block_ids=ids, draft_block=block, folded=folded)


@lru_cache(maxsize=512)
def _no_tokens(requests: int, gamma: int, device: torch.device) -> Tensor:
    """Return [R, gamma] int64, shared and read-only."""
    return torch.zeros(requests, gamma, dtype=torch.int64, device=device)
