"""Target hidden states of accepted tokens into the draft's K/V cache, in a few kernel calls.

Adapts `DSparkDraftMixin.write_target_hidden_kv` of sglang/srt/models/dspark.py (0.5.23; paper,
3.1.1: the context is injected as keys and values of every draft layer). Upstream projects every row
of the verify window and selects the accepted ones when it writes; here the others are left out
before anything is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from sglang_dspark.serving.cpu import fused_ops, linear
from sglang_dspark.serving.cpu.jit import exact_kernel, kernel

_FLOAT = torch.float32


@kernel
def _write(projected, first, weight, epsilon, positions, cos_sin, slots, keys, values):  # type: ignore[no-untyped-def]
    """One layer's keys (normed, rotated) and values from projected [n, all layers' K and V].

    first: column where the layer's keys start. weight [D]. cos_sin [positions, rotary].
    keys, values [slots, Hkv, D].
    """
    heads, width = keys.shape[1], keys.shape[2]
    half = cos_sin.shape[1] // 2
    for i in range(positions.shape[0]):
        cosine, sine = cos_sin[positions[i], :half], cos_sin[positions[i], half:]
        for h in range(heads):
            start = first + h * width
            row = projected[i, start : start + width]
            target = keys[slots[i], h]
            squares = np.float32(0.0)
            for d in range(width):
                squares += row[d] * row[d]
            scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + np.float32(epsilon))
            for d in range(width):
                target[d] = (row[d] * scale) * weight[d]
            for d in range(half):
                a, b = target[d], target[d + half]
                target[d] = a * cosine[d] - b * sine[d]
                target[d + half] = b * cosine[d] + a * sine[d]
            start += heads * width
            value = projected[i, start : start + width]
            values[slots[i], h, :] = value


def fits(model: Any, pool: Any, target_hidden: Tensor) -> bool:
    """Whether draft model, pool and rows [n, m*d] are what the kernel reads and writes."""
    attention = [layer.self_attn for layer in model.layers]
    rotary = attention[0].rotary_emb
    return (
        target_hidden.dtype is _FLOAT
        and target_hidden.dim() == 2
        and 0 < target_hidden.shape[0] <= fused_ops.MOST_ROWS
        and type(pool) is MHATokenToKVPool
        and pool.store_dtype == _FLOAT
        and pool.kv_cache_layout == "nhd"
        and type(rotary) in (RotaryEmbedding, Llama3RotaryEmbedding)
        and rotary.is_neox_style
        and rotary.cos_sin_cache.dtype == _FLOAT
        and linear.prepare() is not None
        and all(
            part.v_scale is None and type(part.k_norm) is RMSNorm and part.attn.k_scale is None
            for part in attention
        )
    )


def write(
    model: Any,
    pool: Any,
    stacked: dict[str, Any],
    context: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """Write every layer's K and V of n context tokens.

    stacked: the layers' K and V projections as one weight (`_stacked_ctx_kv_params`), without bias.
    context [n, d]: projected target features. positions, slots [n] int64.
    """
    projected = linear.product(context, stacked["weight"]).numpy()
    first = model.layers[0].self_attn
    cos_sin = first.rotary_emb.cos_sin_cache.numpy()
    norms = stacked["k_norm_weight"].numpy()  # [layers, D]
    at, where = positions.numpy(), slots.numpy()
    for number, layer in enumerate(model.layers):
        index = layer.self_attn.attn.layer_id - pool.start_layer
        _write(
            projected, number * 2 * first.kv_size, norms[number], stacked["eps"], at, cos_sin,
            where, pool.k_buffer[index].numpy(), pool.v_buffer[index].numpy(),
        )  # fmt: skip


def committed(lens: Tensor, width: int) -> Tensor:
    """Rows of windows of `width` tokens that stay: lens [R] -> flat row numbers [sum(lens)]."""
    out = torch.empty(lens.shape[0] * width, dtype=torch.int64)
    return out[: _list_rows(lens.numpy(), width, out.numpy())]


@exact_kernel
def _list_rows(lens, width, out):  # type: ignore[no-untyped-def]
    taken = 0
    for r in range(lens.shape[0]):
        for k in range(lens[r]):
            out[taken] = r * width + k
            taken += 1
    return taken
