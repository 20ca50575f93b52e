"""Which decoder layers layers/spec.py serves, and what it needs to know of them.

Reads upstream's modules (sglang/srt/models/{llama,llama_eagle,dflash}.py, 0.5.23) once a layer.
Other dtypes, quantised, LoRA-wrapped, biased or sharded layers and layers with hooks do not fit;
they keep upstream's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.models.dflash import DFlashAttention, DFlashDecoderLayer, DFlashMLP
from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from sglang.srt.models.llama_eagle import LlamaDecoderLayer as EagleDecoderLayer
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sglang_dspark.serving.cpu import linear, paged
from sglang_dspark.serving.cpu.layers.spec import (
    NO_NORM,
    Ending,
    LayerSpec,
    Norm,
    Product,
    Shape,
    Watched,
)
from sglang_dspark.serving.cpu.narrow_matmul import NarrowMatmul

_FLOAT = torch.float32


def llama_layer_of(layer: Any) -> LayerSpec | None:
    """Resolve a target's layer with its weights in place; None where it does not fit."""
    return _resolve(layer, (None, None)) if _plain_llama(layer, LlamaDecoderLayer) else None


def eagle_layer_of(layer: Any) -> LayerSpec | None:
    """Resolve a layer of an MTP (EAGLE) draft, the first of which has no norm of its input."""
    if not _plain_llama(layer, EagleDecoderLayer):
        return None
    first = layer.self_attn.attn.layer_id == 0
    return _resolve(layer, (None, None)) if first == (_input_norm(layer) is None) else None


def draft_layer_of(layer: Any) -> LayerSpec | None:
    """Resolve a layer of a DFlash-style draft; None where it does not fit."""
    if not _plain_draft(layer):
        return None
    attention = layer.self_attn
    return _resolve(layer, (attention.q_norm, attention.k_norm))


def ending_of(model: Any) -> Ending | None:
    """Resolve `model.norm`, the norm behind the last layer; None where it does not fit."""
    norm = model.norm
    if (
        type(norm) is not RMSNorm
        or not _plain_norm(norm)
        or norm._forward_hooks
        or norm._forward_pre_hooks
    ):
        return None
    (weight,) = _tensors(norm)
    return Ending(_norm(norm), (model._modules, "norm", norm), weight)


def _resolve(layer: Any, head_norms: tuple[RMSNorm | None, RMSNorm | None]) -> LayerSpec | None:
    kernel = linear.prepare()
    if kernel is None or get_parallel().tp_size != 1:
        return None
    shape, weights = _shape(layer), _weights(layer)
    products = {name: _product(kernel, weight) for name, weight in weights.items()}
    if None in products.values() or not _consistent(shape, weights, layer):
        return None
    rotary, radix = layer.self_attn.rotary_emb, layer.self_attn.attn
    window = radix.sliding_window_size
    return LayerSpec(
        shape=shape,
        kernel=kernel,
        norms=(
            _norm(_input_norm(layer)),
            _norm(layer.post_attention_layernorm),
            _norm(head_norms[0]),
            _norm(head_norms[1]),
        ),
        **products,  # type: ignore[arg-type]
        cos_sin=rotary.cos_sin_cache,
        index=radix.layer_id,
        scale=radix.scaling,
        causal=radix.attn_type != AttentionType.ENCODER_ONLY,
        window=paged.NO_WINDOW if window is None or window < 0 else int(window),
        parts=_parts(layer),
        tensors=_tensors(layer),
    )


def _shape(layer: Any) -> Shape:
    radix = layer.self_attn.attn
    return Shape(
        layer.self_attn.qkv_proj.input_size,
        radix.tp_q_head_num,
        radix.tp_k_head_num,
        radix.qk_head_dim,
        layer.mlp.down_proj.input_size,
    )


def _weights(layer: Any) -> dict[str, Tensor | None]:
    """What a layer multiplies with, None where a product is not a plain one."""
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "qkv": _plain_weight(attention.qkv_proj),
        "o": _plain_weight(attention.o_proj),
        "gate_up": _plain_weight(mlp.gate_up_proj),
        "down": _plain_weight(mlp.down_proj),
    }


def _parts(layer: nn.Module) -> tuple[tuple[Mapping[str, Any], str, nn.Module], ...]:
    """Every module below the layer, with the dict of its owner's that names it."""
    return tuple(
        (owner._modules, name, module)
        for owner in layer.modules()
        for name, module in owner._modules.items()
        if module is not None
    )


def _tensors(layer: nn.Module) -> tuple[Watched, ...]:
    return tuple(
        Watched(owner, name, tensor, tensor.data_ptr())
        for module in layer.modules()
        for owner in (module._parameters, module._buffers)
        for name, tensor in owner.items()
        if tensor is not None
    )


def _plain_llama(layer: Any, kind: type[Any]) -> bool:
    return (
        type(layer) is kind
        and type(layer.self_attn) is LlamaAttention
        and type(layer.mlp) is LlamaMLP
        and _plain_modules(layer)
        and layer.mlp.dual_gemm.mode is None
        and not layer.mlp.activation_quant.enabled
        and _plain_boundary(layer.attn_boundary)
        and _plain_boundary(layer.ffn_boundary)
    )


def _plain_draft(layer: Any) -> bool:
    attention = layer.self_attn
    if (
        type(layer) is not DFlashDecoderLayer
        or type(attention) is not DFlashAttention
        or type(layer.mlp) is not DFlashMLP
    ):
        return False
    norms = (attention.q_norm, attention.k_norm)
    return (
        _plain_modules(layer)
        and layer.attention_conv is None
        and layer.mlp_conv is None
        and attention.v_scale is None
        and attention.attention_sink_bias is None
        and all(type(norm) is RMSNorm and _plain_norm(norm) for norm in norms)
        and all(norm.weight.shape == (attention.head_dim,) for norm in norms)
    )


def _plain_modules(layer: Any) -> bool:
    """Upstream's classes with the options our kernels know, and nobody's hooks."""
    attention, mlp = layer.self_attn, layer.mlp
    radix, rotary = attention.attn, attention.rotary_emb
    norms = _norms(layer)
    exact = (
        (radix, RadixAttention),
        (mlp.act_fn, SiluAndMul),
        *((norm, RMSNorm) for norm in norms),
        (attention.qkv_proj, QKVParallelLinear),
        (attention.o_proj, RowParallelLinear),
        (mlp.gate_up_proj, MergedColumnParallelLinear),
        (mlp.down_proj, RowParallelLinear),
    )
    return (
        all(type(module) is kind for module, kind in exact)
        and type(rotary) in (RotaryEmbedding, Llama3RotaryEmbedding)
        and rotary.is_neox_style
        and rotary.cos_sin_cache.dtype == _FLOAT
        and rotary.cos_sin_cache.is_contiguous()
        and rotary.head_size == radix.qk_head_dim == radix.v_head_dim
        and not radix.is_cross_attention
        and not radix.logit_cap
        and radix.quant_method is None
        and all(_plain_norm(norm) for norm in norms)
        and not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    )


def _input_norm(layer: Any) -> RMSNorm | None:
    return getattr(layer, "input_layernorm", None)


def _norms(layer: Any) -> tuple[RMSNorm, ...]:
    found = (_input_norm(layer), layer.post_attention_layernorm)
    return tuple(norm for norm in found if norm is not None)


def _plain_boundary(boundary: Any) -> bool:
    return boundary.declaration.row_transport is None and boundary.declaration.update.is_plain_add


def _plain_norm(norm: RMSNorm) -> bool:
    return (
        norm.weight.dtype == _FLOAT
        and norm.weight.is_contiguous()
        and norm.variance_size_override is None
        and norm.override_orig_dtype in (None, _FLOAT)
    )


def _plain_weight(layer: Any) -> Tensor | None:
    """The weight [N, K] of an unquantised linear layer without bias, else None."""
    if (
        type(layer.quant_method) is not UnquantizedLinearMethod
        or layer.bias is not None
        or getattr(layer, "use_intel_amx_backend", False)
    ):
        return None
    weight: Tensor = layer.weight
    return weight


def _product(kernel: NarrowMatmul, weight: Tensor | None) -> Product | None:
    if weight is None or weight.dim() != 2 or weight.requires_grad:
        return None
    n, k = weight.shape
    if not linear.eligible(torch.empty(1, k), weight):
        return None
    threads = linear.threads_for(n, k) if kernel.threads_available else 1
    return Product(weight.data_ptr(), n, k, threads)


def _norm(norm: RMSNorm | None) -> Norm:
    return NO_NORM if norm is None else Norm(norm.weight.data_ptr(), norm.variance_epsilon)


def _consistent(shape: Shape, weights: Mapping[str, Tensor | None], layer: Any) -> bool:
    """Whether weights and norms have the sizes that the buffers assume."""
    query, key = shape.heads * shape.head, shape.kv_heads * shape.head
    expected = {
        "qkv": (query + 2 * key, shape.hidden),
        "o": (shape.hidden, query),
        "gate_up": (2 * shape.mlp, shape.hidden),
        "down": (shape.hidden, shape.mlp),
    }
    return all(
        weight is not None and tuple(weight.shape) == expected[name]
        for name, weight in weights.items()
    ) and all(tuple(norm.weight.shape) == (shape.hidden,) for norm in _norms(layer))
