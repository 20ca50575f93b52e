"""Draft or skip: gamma tokens for every request, or a proposal of none.

Upstream (0.5.23), sglang/srt/speculative/dspark_components/dspark_draft.py, drafts in every step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving.step.seeds import Seeds, seeded_draft


def propose(worker: Any, batch: Any, window: Any, seeds: Seeds | None) -> Any:
    """Upstream's `DraftProposal` of gamma drafts a request; seeds: what draws some of them."""
    from sglang.srt.speculative.dspark_components.dspark_observability import InfoSegment

    segment = worker._observers.segment(InfoSegment.DRAFT)
    with worker._draft_context(), segment, seeded_draft(worker, batch, seeds):
        return worker._proposer.propose(
            batch=batch,
            draft_input=batch.spec_info,
            verify_window=window,
            bs=len(batch.seq_lens),
            device=worker.device,
            target_model=worker.target_worker.model_runner.model,
            sampling_info=batch.sampling_info,
        )


def skip(worker: Any, batch: Any, *, folded: bool) -> Any:
    """A `DraftProposal` whose drafts nobody reads, as none is verified.

    folded: whether the accept rule of the verify graph may take it.
    """
    from sglang.srt.speculative.dspark_components.dspark_draft import (
        DraftBlockResult,
        DraftProposal,
        resolve_draft_params,
    )

    requests, proposer = len(batch.seq_lens), worker._proposer
    ids = proposer.draft_block_ids_view(bs=requests, device=batch.seq_lens.device)
    ids[:, 0].copy_(batch.spec_info.bonus_tokens.view(-1))
    params = resolve_draft_params(
        sampling_info=batch.sampling_info, bs=requests, device=batch.seq_lens.device
    )
    block = DraftBlockResult(
        draft_tokens=_no_tokens(requests, int(worker.gamma), batch.seq_lens.device),
        corrected_logits=None,
        greedy_mask=params.greedy_mask,
        temperatures=params.temperatures,
        greedy_draft=True,
    )
    return DraftProposal(draft_block_ids=ids, draft_block=block, folded=folded)


@lru_cache(maxsize=512)
def _no_tokens(requests: int, gamma: int, device: torch.device) -> Tensor:
    """[R, gamma] int64; nobody writes to it."""
    return torch.zeros(requests, gamma, dtype=torch.int64, device=device)
