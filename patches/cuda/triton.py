"""Ragged verify windows on the Triton attention backend, eager and in graphs.

Upstream: sglang/srt/layers/attention/triton_backend.py.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.backends.cuda import triton_ragged
from sglang_dspark.patches.seam import Seam


def ragged_metadata(result: None, backend: Any, forward_batch: Any) -> None:
    """AFTER hook of `init_forward_metadata`."""
    triton_ragged.use_windows(backend, forward_batch)


def ragged_buffers(
    result: Any,
    backend: Any,
    plan: Any,
    bs: int,
    seq_lens: Any,
    spec_info: Any,
    req_pool_indices: Any,
) -> None:
    """AFTER hook of `_update_target_verify_buffers`."""
    triton_ragged.stage_windows(backend, bs, spec_info)


_BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"

SEAMS = (
    Seam(
        name="cuda-triton-ragged",
        target=f"{_BACKEND}.init_forward_metadata",
        kind="after",
        hook=ragged_metadata,
        signature="(self, forward_batch)",
        why="the backend ignores the layout: a compact pass aborts at four users",
        device="cuda",
    ),
    Seam(
        name="cuda-triton-ragged-graph",
        target=f"{_BACKEND}._update_target_verify_buffers",
        kind="after",
        hook=ragged_buffers,
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
