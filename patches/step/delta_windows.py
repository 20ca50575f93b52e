"""Verify windows of different lengths by gated delta rule layers (GDN: Qwen3.5, Qwen3-Next).

Upstream: `GDNAttnBackend.forward_extend` (sglang/srt/layers/attention/linear/gdn_backend.py) takes
every window for gamma + 1 rows wide, though its metadata already has the bounds of packed windows,
as Kimi's layers use them (kda_backend.py). Here the convolution runs on rows spread over whole
windows, and the recurrence on packed rows, so a short window stores few states. To drop when
upstream does it (sgl-project/sglang#38897).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.patches.seam import Seams, Upstream
from sglang_dspark.serving import upstream

SEAMS = Seams()


@SEAMS.subclass(
    "delta-windows",
    "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend",
    why="upstream's GDN layers take all verify windows for gamma + 1 rows wide",
)
class PackedDeltaRule(Upstream):  # type: ignore[misc]
    """Add packed windows to upstream's backend of GDN layers."""

    supports_ragged_verify_graph: bool

    def __init__(self, model_runner: Any) -> None:
        """Take packed windows if Triton verifies them; other kernels, and replay, cannot."""
        super().__init__(model_runner)
        chosen = self.kernel_dispatcher
        self.supports_ragged_verify_graph = (
            chosen.verify_kernel is chosen.tree_verify_kernel
            and not self.req_to_token_pool.mamba_pool.enable_linear_replayssm_spec
        )

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Tensor, b: Tensor, **kwargs: Any
    ) -> Any:
        """Return [1, N, HV, V] of a layer; windows are packed where the batch has their layout."""
        verifies = forward_batch.forward_mode.is_target_verify()
        layout = forward_batch.spec_info.ragged_verify_layout if verifies else None
        if layout is None or not self.supports_ragged_verify_graph:
            return super().forward_extend(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        starts, width = self.forward_metadata.query_start_loc, _width(forward_batch)  # [R + 1]
        slots = self.forward_metadata.mamba_cache_indices[: len(starts) - 1]
        held = upstream.select_verify_intermediate_state_indices(
            self.verify_intermediate_state_indices,
            forward_batch.req_pool_indices,
            slots >= 0,
            self.req_to_token_pool.size,
        )[: len(slots)]
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        places = _places(starts, slots, len(mixed_qkv), width)  # [N]
        query, key, value = _convolved(layer, cache, mixed_qkv, places, width, slots, held)
        out = self.kernel_dispatcher.target_verify(
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            q=query,
            k=key,
            v=value,
            a=a,
            b=b,
            ssm_states=cache.temporal,
            cache_indices=slots,
            query_start_loc=starts,
            intermediate_states_buffer=cache.intermediate_ssm,
            intermediate_state_indices=held,
            cache_steps=width,
            retrieve_parent_token=None,
        )
        inside = places < len(slots) * width  # kernels leave the rows of no window unwritten
        return out.where(inside.view(1, -1, 1, 1), 0)


def _convolved(
    layer: Any,
    cache: Any,
    mixed_qkv: Tensor,
    places: Tensor,
    width: int,
    slots: Tensor,
    held: Tensor,
) -> Iterator[Tensor]:
    """Return queries, keys and values [1, N, heads, size] of the rows behind the convolution.

    slots, held: [R], of the states and of those behind each token.
    """
    requests = len(slots)
    # One more row takes what is in no window.
    spread = mixed_qkv.new_zeros(requests * width + 1, mixed_qkv.shape[1])
    spread.index_copy_(0, places, mixed_qkv)
    convolved = upstream.causal_conv1d_update(
        spread[:-1].view(requests, width, -1).transpose(1, 2),
        cache.conv[0],
        layer.conv_weights,
        layer.bias,
        layer.activation,
        conv_state_indices=slots,
        intermediate_conv_window=cache.intermediate_conv_window[0],
        intermediate_state_indices=held,
    )
    spread[:-1] = convolved.transpose(1, 2).reshape(requests * width, -1)
    parts = spread[places].split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    sizes = (layer.head_q_dim, layer.head_k_dim, layer.head_v_dim)
    for part, size in zip(parts, sizes, strict=True):
        yield part.unflatten(-1, (-1, size)).unsqueeze(0)


def _width(forward_batch: Any) -> int:
    """Return gamma + 1."""
    return int(forward_batch.spec_info.draft_token_num)


def _places(starts: Tensor, slots: Tensor, rows: int, width: int) -> Tensor:
    """Return each packed row's place [N] among R windows of `width`; R * width: in none.

    In no window are rows that a graph pads, and those of a request without a slot (-1).
    """
    requests = len(slots)
    row = torch.arange(rows, dtype=starts.dtype, device=starts.device)
    window = torch.searchsorted(starts[1:], row, right=True).clamp_(max=requests - 1)
    place = window * width + row - starts[window]
    inside = (row < starts[-1]) & (slots[window] >= 0)
    return place.where(inside, requests * width)
