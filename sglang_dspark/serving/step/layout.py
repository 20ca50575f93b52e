"""Layout: verify lengths as the ragged windows of one pass, without their values on the host."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dspark.schedule.plan import Plan


def admitted_drafts(plan: Plan) -> int:
    """K as it comes out: admission hands out the budget, or all that the limits leave."""
    if not plan.speculates:
        return 0
    return min(plan.budget.drafts, int(plan.limits.sum()))


def layout_of(lengths: Tensor, tokens: int) -> Any:
    """Upstream's `RaggedVerifyLayout` of l_r [R] int32 in a pass of `tokens`; it counts anchors."""
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    return RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=lengths + 1, graph_num_tokens=tokens
    )


def window_of(worker: Any, batch: Any) -> Any:
    """Positions and cache slots of all gamma + 1 places of each request: [R, gamma + 1]."""
    from sglang.srt.speculative.dspark_components.dspark_planner import alloc_verify_window

    host_lens = batch.seq_lens_cpu
    return alloc_verify_window(
        batch=batch,
        bs=len(batch.seq_lens),
        device=worker.device,
        verify_num_draft_tokens=worker.verify_num_draft_tokens,
        block_pos_offsets=worker._block_pos_offsets,
        model_runner=worker.model_runner,
        seq_lens_cpu=host_lens if host_lens is not None else batch.spec_info.nxt_kv_lens_cpu,
    )
