"""Resolve a draft model and its cache once for commits.

The K/V projections of all layers as one weight, norms, rotation, and addresses of each layer's
keys and values.

Upstream: `DSparkDraftMixin` in sglang/srt/models/dspark.py, which dense drafts and those
with experts share. It keeps the stacked weight for prefills, so that is stored once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sglang_dspark.kernels import commit_write
from sglang_dspark.kernels.commit_write import DraftLayers
from sglang_dspark.serving import upstream


@dataclass(frozen=True)
class DraftContext:
    """project: [n, d] to [n, L * 2 * H * D], the keys and values of every layer."""

    layers: DraftLayers
    project: Callable[[Tensor], Tensor]
    rotary: Any
    weight: Tensor  # of the first layer, and its address when resolved
    address: int

    def holds(self, model: Any, pool: Any) -> bool:
        """Return whether model and pool are still those that were resolved."""
        first = model.layers[0]
        weight, cache = first.self_attn.qkv_proj.weight, pool.k_buffer[_place(first, pool)]
        return (
            weight is self.weight
            and weight.data_ptr() == self.address
            and cache.data_ptr() == self.layers.keys[0].data_ptr()
        )


def obstacle(model: Any, pool: Any) -> str | None:
    """Return the reason why our operator cannot write this model's context; None if it can."""
    if not _writes_as_upstream(model):
        return f"{type(model).__name__} writes its context unlike DSparkDraftMixin"
    reason = _obstacle_of(pool)
    if reason is not None:
        return reason
    attention = [layer.self_attn for layer in model.layers]
    first = attention[0].rotary_emb
    plain = (
        upstream.RotaryEmbedding,
        upstream.Llama3RotaryEmbedding,
        upstream.YaRNScalingRotaryEmbedding,
    )
    other = upstream.other_class("its rotation", first, *plain)
    if other is not None:
        return other
    if first.position_start != 0:
        return f"its rotation begins at position {first.position_start}"
    for part in attention:
        if part.rotary_emb is not first:
            return "its layers rotate in unlike ways"
        other = upstream.other_class("the norm of its keys", part.k_norm, upstream.RMSNorm)
        if other is not None:
            return other
        if part.k_norm.variance_epsilon != attention[0].k_norm.variance_epsilon:
            return "its layers have norms of unlike epsilon"
        if part.v_scale is not None:
            return "its values are scaled"
    if model._fused_kv_write_bundle(pool) is None and model._stacked_ctx_kv_params() is None:
        return "its layers' projections are no plain weights"
    return commit_write.why_not(_layers_of(model, pool), first.rotary_dim)


def _writes_as_upstream(model: Any) -> bool:
    """Return whether the model's methods are those of dense drafts; some classes replace them."""
    names = ("write_target_hidden_kv", "_stacked_ctx_kv_params", "_build_fused_kv_write_bundle")
    own = (getattr(type(model), name, None) for name in names)
    return all(o is getattr(upstream.DSparkDraftMixin, n) for o, n in zip(own, names, strict=True))


def _obstacle_of(pool: Any) -> str | None:
    """Return the property of a cache that the operator does not support, or None."""
    names = ("set_kv_buffer", "_store_kv_layer")
    own = (getattr(type(pool), name, None) for name in names)
    if any(o is not getattr(upstream.MHATokenToKVPool, n) for o, n in zip(own, names, strict=True)):
        return f"its cache is a {type(pool).__name__} and stores unlike MHATokenToKVPool"
    if pool.kv_cache_layout != "nhd":
        return f"its cache has the layout {pool.kv_cache_layout}"
    if pool.is_quantized_kv_cache:
        return "its cache is quantised with scales of its own"
    return None


def context_of(model: Any, pool: Any) -> DraftContext:
    """Resolve a model and a pool without an obstacle."""
    attention = model.layers[0].self_attn
    return DraftContext(
        layers=_layers_of(model, pool),
        project=_projection_of(model, pool),
        rotary=attention.rotary_emb,
        weight=attention.qkv_proj.weight,
        address=attention.qkv_proj.weight.data_ptr(),
    )


def _projection_of(model: Any, pool: Any) -> Callable[[Tensor], Tensor]:
    """Return upstream's projection, if it has one for this cache: its weight is stored once."""
    bundle = model._fused_kv_write_bundle(pool)
    if bundle is not None:
        project: Callable[[Tensor], Tensor] = bundle.project
        return project
    stacked = model._stacked_ctx_kv_params()
    return lambda hidden: linear(hidden, stacked["weight"], stacked["bias"])


def _layers_of(model: Any, pool: Any) -> DraftLayers:
    attention = [layer.self_attn for layer in model.layers]
    places = [_place(layer, pool) for layer in model.layers]
    norms = _norms_of(model, pool)
    return DraftLayers(
        keys=[pool.k_buffer[place].view(pool.dtype) for place in places],
        values=[pool.v_buffer[place].view(pool.dtype) for place in places],
        norms=norms,
        scales=torch.tensor([_scales(part, pool) for part in attention], device=norms.device),
        epsilon=attention[0].k_norm.variance_epsilon,
        neox=attention[0].rotary_emb.is_neox_style,
    )


def _norms_of(model: Any, pool: Any) -> Tensor:
    """Return upstream's own copy [L, D], which updates renew in place, as graphs read it."""
    bundle = model._fused_kv_write_bundle(pool)
    norms = (
        model._stacked_ctx_kv_params()["k_norm_weight"] if bundle is None else bundle.k_norm_weights
    )
    assert isinstance(norms, Tensor)
    return norms.detach()


def _place(layer: Any, pool: Any) -> int:
    return int(layer.self_attn.attn.layer_id) - int(pool.start_layer)


def _scales(attention: Any, pool: Any) -> list[float]:
    """Return the scales of keys and values; SGLang's cache applies them if its dtype differs."""
    if attention.qkv_proj.weight.dtype is pool.dtype:
        return [1.0, 1.0]
    own = (attention.attn.k_scale, attention.attn.v_scale)
    return [1.0 if scale is None else float(scale) for scale in own]
