"""Layout: verify lengths as the ragged windows of one pass, without their values on the host.

indptr [R + 1] int32 says it all: request r has the rows indptr[r] to indptr[r + 1] of the packed
pass, its anchor and l_r drafts. It is what the step's stages, and ranks, hand to each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.schedule.plan import Plan
from sglang_dspark.serving import upstream


def admitted_drafts(plan: Plan) -> int:
    """K as it comes out: admission hands out the budget, or all that the limits leave."""
    if not plan.speculates:
        return 0
    return min(plan.budget.drafts, int(plan.limits.sum()))


def anchors_alone(requests: int, device: torch.device | str = "cpu") -> Tensor:
    """indptr of windows without drafts."""
    return torch.arange(requests + 1, dtype=torch.int32, device=device)


def layout_of(indptr: Tensor, tokens: int) -> Any:
    """Upstream's `RaggedVerifyLayout` of these windows in a pass of `tokens`."""
    return upstream.RaggedVerifyLayout(
        verify_lens=indptr.diff(),
        graph_num_tokens=tokens,
        extend_start_loc=indptr[:-1],
        qo_indptr_device=indptr,
    )


def window_of(worker: Any, batch: Any) -> Any:
    """Positions and cache slots of all gamma + 1 places of each request: [R, gamma + 1]."""
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
