"""Windows of unlike lengths on SGLang's Triton attention backend.

Upstream, sglang/srt/layers/attention/triton_backend.py, takes every request's window for
gamma + 1 rows wide and never looks at the layout; its kernels read where a window begins from
`qo_indptr`, so that is all there is to mend, in the eager metadata and in a graph's buffers. Its
unified kernel of deterministic inference counts rows by itself; features.py leaves that out.
"""

from __future__ import annotations

from typing import Any


def use_windows(backend: Any, forward_batch: Any) -> None:
    """The metadata of an eager verify pass begins each request where the layout does."""
    layout = _layout_of(getattr(forward_batch, "spec_info", None))
    if layout is not None and forward_batch.forward_mode.is_target_verify():
        backend.forward_metadata.qo_indptr = layout.qo_indptr_device


def stage_windows(backend: Any, requests: int, spec_info: Any) -> None:
    """Stage the windows in the buffers that a captured graph of `requests` slots reads.

    Tokens of the tier that no window holds go to the empty slots, with none of these to the last
    window, as in SGLang's FA3 backend: rows of no window stay unwritten, and what they hold reaches
    MoE routing and per-tensor scales. Attention is causal, so the last window's own rows do not
    read them. A window longer than a tile of the kernel (64 rows or more) is written up to there,
    which takes tiers more than 56 tokens apart: graphs of more than 64 requests.
    """
    layout = _layout_of(spec_info)
    if layout is None:
        return
    layout = layout.padded_to_bucket(padded_bs=requests)
    backend.qo_indptr[: requests + 1].copy_(layout.qo_indptr_device)


def _layout_of(spec_info: Any) -> Any:
    return getattr(spec_info, "ragged_verify_layout", None)
