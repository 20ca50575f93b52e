"""Support ragged verify windows on SGLang's Triton attention backend, eager and in graphs.

Upstream (sglang/srt/layers/attention/triton_backend.py) assumes that every request's window has
gamma + 1 rows, and ignores the layout. Its kernels read where a window begins from `qo_indptr`, so
only that is set here, in the eager metadata and in a graph's buffers. Its unified kernel of
deterministic inference counts rows by itself; backends/cuda/features.py excludes it.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seam


def use_windows(result: None, backend: Any, forward_batch: Any) -> None:
    """AFTER hook of `init_forward_metadata`: begin each request where the layout of a pass does."""
    layout = _layout_of(getattr(forward_batch, "spec_info", None))
    if layout is not None and forward_batch.forward_mode.is_target_verify():
        backend.forward_metadata.qo_indptr = layout.qo_indptr_device


def stage_windows(
    result: Any,
    backend: Any,
    plan: Any,
    bs: int,
    seq_lens: Any,
    spec_info: Any,
    req_pool_indices: Any,
) -> None:
    """AFTER hook of `_update_target_verify_buffers`: stage the windows for a captured graph.

    bs: slots of the graph. Tokens of the tier that are in no window are given to the empty slots,
    and to the last window if no slot is empty, as in SGLang's FA3 backend: rows of no window would
    stay unwritten, and their content reaches MoE routing and per-tensor scales. Attention is
    causal, so the last window's own rows do not read them. A window longer than a tile of the
    kernel (64 rows or more) is written up to there. That needs tiers more than 56 tokens apart:
    graphs of more than 64 requests.
    """
    layout = _layout_of(spec_info)
    if layout is None:
        return
    layout = layout.padded_to_bucket(padded_bs=bs)
    backend.qo_indptr[: bs + 1].copy_(layout.qo_indptr_device)


def _layout_of(spec_info: Any) -> Any:
    return getattr(spec_info, "ragged_verify_layout", None)


_BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"

SEAMS = (
    Seam(
        name="cuda-triton-ragged",
        target=f"{_BACKEND}.init_forward_metadata",
        kind="after",
        hook=use_windows,
        signature="(self, forward_batch)",
        why="the backend ignores the layout: a compact pass aborts at four users",
        device="cuda",
    ),
    Seam(
        name="cuda-triton-ragged-graph",
        target=f"{_BACKEND}._update_target_verify_buffers",
        kind="after",
        hook=stage_windows,
        signature="(self, plan, bs, seq_lens, spec_info, req_pool_indices)",
        why="the same in the buffers of a captured graph",
        device="cuda",
    ),
    Seam(
        name="cuda-triton-ragged-supported",
        target=f"{_BACKEND}.supports_ragged_verify_graph",
        kind="set",
        hook=True,
        expected_repr="False",
        why="the runner asks this before it replays a ragged pass",
        device="cuda",
    ),
)
