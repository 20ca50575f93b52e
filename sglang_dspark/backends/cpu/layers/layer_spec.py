"""Resolve decoder layers for the fast path: sizes, and addresses of weights.

Reads upstream's modules (sglang/srt/models/{llama,llama_eagle,qwen2,qwen3,dflash}.py) once a layer,
and again when weights are updated (layer_stack.py). Layers with other dtypes, quantisation, LoRA,
shards, hooks or biases (except of queries, keys and values) are not supported; they use upstream's
code, and the log names the reason (fast_paths.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import linear, paged_attention
from sglang_dspark.backends.cpu.fast_paths import UnsupportedError, require, require_class
from sglang_dspark.backends.cpu.linear import NarrowMatmul
from sglang_dspark.backends.cpu.paged_attention import Attention
from sglang_dspark.serving import upstream

_FLOAT = torch.float32


@dataclass(frozen=True)
class Shape:
    """Widths of a layer: d hidden, H heads and Hkv KV heads of D dimensions, f in the MLP."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    mlp: int

    @property
    def scratch_width(self) -> int:
        """Count the floats that csrc/layers.cpp needs for the rows between its operators."""
        heads, kv_heads = self.heads * self.head, self.kv_heads * self.head
        return 4 * self.hidden + 2 * heads + 2 * kv_heads + 3 * self.mlp


class Product(ctypes.Structure):
    """The address of a weight [n, k], and the threads that `linear.narrow` would use."""

    _fields_ = (("weight", ctypes.c_void_p), ("threads", ctypes.c_int64))


class Norm(ctypes.Structure):
    """One RMSNorm: address of the weight [d], None for no norm, and epsilon."""

    _fields_ = (("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float))


class Layer(ctypes.Structure):
    """A layer as csrc/layers.h declares it. input, mlp: norms before attention and MLP."""

    _fields_ = (
        *((name, Product) for name in ("qkv", "out", "gate_up", "down")),
        ("qkv_bias", ctypes.c_void_p),
        *((name, Norm) for name in ("input", "mlp", "query", "key")),
        ("cos_sin", ctypes.c_void_p),
        ("rotary", ctypes.c_int64),
        ("attention", Attention),
    )


@dataclass(frozen=True)
class LayerSpec:
    """The constants of a layer's passes, valid until a parameter is replaced.

    layer: without the addresses of keys and values. index: of the layer in the pool's buffers, from
    the pool's start_layer. tensors: the layer's, whose memory stays allocated while addresses
    in it are used.
    """

    shape: Shape
    kernel: NarrowMatmul
    layer: Layer
    index: int
    tensors: tuple[Tensor, ...]


def target_layer_of(layer: Any) -> LayerSpec:
    """Resolve a layer of a Llama, Qwen2 or Qwen3 target, with its weights in place.

    Raises UnsupportedError where it is not supported, as the other functions here do."""
    if type(layer) is upstream.Qwen2DecoderLayer:
        _require_plain(layer, (type(layer), upstream.Qwen2Attention, upstream.Qwen2MLP))
        _require_served_policy()
        return _resolve(layer, (None, None))
    if type(layer) is not upstream.Qwen3DecoderLayer:
        _require_plain(
            layer, (upstream.LlamaDecoderLayer, upstream.LlamaAttention, upstream.LlamaMLP)
        )
        return _resolve(layer, (None, None))
    _require_plain(layer, (upstream.Qwen3DecoderLayer, upstream.Qwen3Attention, upstream.Qwen2MLP))
    attention = layer.self_attn
    _require_head_norms(attention)
    _require_served_policy()
    return _resolve(layer, (attention.q_norm, attention.k_norm))


def _require_served_policy() -> None:
    trained = upstream.get_exec().deterministic.rl_on_policy_target
    require(trained is None, "a policy in training uses it")


def eagle_layer_of(layer: Any) -> LayerSpec:
    """Resolve a layer of an MTP (EAGLE) draft, whose first layer has no norm of its input."""
    _require_plain(layer, (upstream.EagleDecoderLayer, upstream.LlamaAttention, upstream.LlamaMLP))
    first = layer.self_attn.attn.layer_id == 0
    require(first == (_input_norm(layer) is None), "its first layer alone has no norm of its input")
    return _resolve(layer, (None, None))


def draft_layer_of(layer: Any) -> LayerSpec:
    """Resolve a layer of a DFlash-style draft."""
    require_class("it", layer, upstream.DFlashDecoderLayer)
    attention = layer.self_attn
    require_class("its attention", attention, upstream.DFlashAttention)
    require_class("its MLP", layer.mlp, upstream.DFlashMLP)
    _require_modules(layer)
    require(layer.attention_conv is None and layer.mlp_conv is None, "it has convolutions")
    require(attention.v_scale is None, "its values are scaled")
    require(attention.attention_sink_bias is None, "its attention has sinks")
    require(attention.qkv_proj.bias is None, "qkv_proj has a bias")  # context_kv.py adds none
    _require_head_norms(attention)
    return _resolve(layer, (attention.q_norm, attention.k_norm))


def require_last_norm(norm: Any, width: int) -> None:
    """Require that the norm after the last layer of rows [n, width] is a plain one."""
    _require_norm(norm)
    require(not (norm._forward_hooks or norm._forward_pre_hooks), "its last norm has hooks")
    require(norm.weight.shape == (width,), "its last norm is not as wide as its rows")


def _resolve(layer: Any, head_norms: tuple[Any, Any]) -> LayerSpec:
    ranks = upstream.get_parallel().tp_size
    require(linear.prepare() is not None, str(linear.why_not()))
    require(ranks == 1, f"its layers are split over {ranks} ranks")
    table, radix = layer.self_attn.rotary_emb.cos_sin_cache, layer.self_attn.attn
    heads = radix.tp_q_head_num, radix.tp_k_head_num, radix.qk_head_dim
    shape = Shape(layer.self_attn.qkv_proj.input_size, *heads, layer.mlp.down_proj.input_size)
    weights = _weights(layer)
    kernel = _kernel(weights)
    products = [_product(name, weight) for name, weight in weights.items()]
    _require_sizes(shape, weights, layer)
    norms = (_input_norm(layer), layer.post_attention_layernorm, *head_norms)
    bias = _qkv_bias(layer.self_attn.qkv_proj, shape)
    found = Layer(
        *products, bias, *map(norm_at, norms), table.data_ptr(), table.shape[1],
        _attention(shape, radix),
    )  # fmt: skip
    tensors = (*layer.parameters(), *layer.buffers())
    return LayerSpec(shape, kernel, found, radix.layer_id, tensors)


def _attention(shape: Shape, radix: Any) -> Attention:
    """Return the attention of a `RadixAttention`, without a cache."""
    return Attention(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        width=shape.head,
        value_width=shape.head,
        window=paged_attention.sliding_window_of(radix),
        scale=radix.scaling,
        causal=radix.attn_type != upstream.AttentionType.ENCODER_ONLY,
    )


def _weights(layer: Any) -> dict[str, Tensor]:
    """Return the weights of a layer's products, [N, K] each, in the order of `Layer`."""
    attention, mlp = layer.self_attn, layer.mlp
    without_bias = {"o": attention.o_proj, "gate_up": mlp.gate_up_proj, "down": mlp.down_proj}
    for name, linear_layer in without_bias.items():
        require(linear_layer.bias is None, f"{name}_proj has a bias")
    layers = {"qkv": attention.qkv_proj, **without_bias}
    return {name: _plain_weight(each, f"{name}_proj") for name, each in layers.items()}


def _qkv_bias(qkv: Any, shape: Shape) -> int | None:
    """Return the address of the bias of queries, keys and values; None without a bias."""
    bias = qkv.bias
    if bias is None:
        return None
    width = (shape.heads + 2 * shape.kv_heads) * shape.head
    plain = bias.dtype is _FLOAT and bias.shape == (width,) and bias.is_contiguous()
    require(plain, f"the bias of qkv_proj is {bias.dtype} {list(bias.shape)}")
    return int(bias.data_ptr())


def _kernel(weights: Mapping[str, Tensor]) -> NarrowMatmul:
    """Return the one kernel for all these weights. Raises UnsupportedError if they differ."""
    kernels = [linear.kernel_of(weight) for weight in weights.values()]
    first = kernels[0]
    if first is None or any(kernel is not first for kernel in kernels):
        raise UnsupportedError("its weights are not all of one format that our kernel reads")
    return first


def _require_plain(layer: Any, kinds: tuple[type[Any], type[Any], type[Any]]) -> None:
    """Require a plain target layer; kinds: classes of the layer, its attention and its MLP."""
    parts = {"it": layer, "its attention": layer.self_attn, "its MLP": layer.mlp}
    for (what, module), kind in zip(parts.items(), kinds, strict=True):
        require_class(what, module, kind)
    _require_modules(layer)
    require(
        layer.mlp.dual_gemm.mode is None, "its gate and up products are fused by another kernel"
    )
    require(not layer.mlp.activation_quant.enabled, "its activations are quantised")
    for boundary in (layer.attn_boundary, layer.ffn_boundary):
        declared = boundary.declaration
        require(declared.row_transport is None, "its rows travel between ranks")
        require(declared.update.is_plain_add, "its residual is no plain sum")


def _require_head_norms(attention: Any) -> None:
    for norm in (attention.q_norm, attention.k_norm):
        _require_norm(norm)
        require(norm.weight.shape == (attention.head_dim,), "its head norms are not one head wide")


def _require_modules(layer: Any) -> None:
    """Require upstream's classes with options that our kernels support, and no hooks."""
    attention, mlp = layer.self_attn, layer.mlp
    radix = attention.attn
    require_class("its attn", radix, upstream.RadixAttention)
    require_class("its act_fn", mlp.act_fn, upstream.SiluAndMul)
    require_class("its qkv_proj", attention.qkv_proj, upstream.QKVParallelLinear)
    require_class("its o_proj", attention.o_proj, upstream.RowParallelLinear)
    require_class("its gate_up_proj", mlp.gate_up_proj, upstream.MergedColumnParallelLinear)
    require_class("its down_proj", mlp.down_proj, upstream.RowParallelLinear)
    _require_rotary(attention.rotary_emb, radix)
    require(not radix.is_cross_attention, "its attention is crossed")
    require(not radix.logit_cap, "its attention's logits are capped")
    require(radix.quant_method is None, "its K/V cache is quantised")
    for norm in _norms(layer):
        _require_norm(norm)
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    require(not hooked, "a module has hooks")


def _require_rotary(rotary: Any, radix: Any) -> None:
    plain = (upstream.RotaryEmbedding, upstream.Llama3RotaryEmbedding)
    require_class("its rotary embedding", rotary, *plain)
    require(rotary.is_neox_style, "its rotary embedding turns adjacent pairs")
    table = rotary.cos_sin_cache
    require(table.dtype == _FLOAT and table.is_contiguous(), "its rotary table is not float32")
    sizes = {rotary.head_size, radix.qk_head_dim, radix.v_head_dim}
    require(len(sizes) == 1, f"its heads have the sizes {sorted(sizes)}")


def _input_norm(layer: Any) -> Any:
    return getattr(layer, "input_layernorm", None)


def _norms(layer: Any) -> tuple[Any, ...]:
    found = (_input_norm(layer), layer.post_attention_layernorm)
    return tuple(norm for norm in found if norm is not None)


def _require_norm(norm: Any) -> None:
    require_class("a norm", norm, upstream.RMSNorm)
    weight, over = norm.weight, norm.override_orig_dtype
    require(weight.dtype == _FLOAT and over in (None, _FLOAT), "a norm does not compute in float32")
    require(weight.is_contiguous(), "a norm's weight has gaps")
    require(norm.variance_size_override is None, "a norm covers a part of its row")


def _plain_weight(layer: Any, name: str) -> Tensor:
    """Return the weight [N, K] of an unquantised linear layer."""
    # Its classes derive from SGLang's, and patches are listed where SGLang cannot be imported.
    from sglang_dspark.backends.cpu.weight_methods import LinearMethod

    kinds = (LinearMethod, upstream.UnquantizedLinearMethod)
    require_class(f"the method of {name}", layer.quant_method, *kinds)
    require(not getattr(layer, "use_intel_amx_backend", False), f"{name} is packed for AMX")
    weight: Tensor = layer.weight
    return weight


def _product(name: str, weight: Tensor) -> Product:
    require(
        weight.dim() == 2 and not weight.requires_grad, f"{name} is no matrix of a served model"
    )
    n, k = weight.shape
    why = f"{name} {weight.dtype} [{n}, {k}] is in no format that our kernel reads"
    require(linear.eligible(torch.empty(1, k), weight), why)
    return Product(weight.data_ptr(), linear.threads_for(n, k))


def norm_at(norm: Any) -> Norm:
    """Describe an RMSNorm by its address; `norm` None: no norm."""
    return Norm() if norm is None else Norm(norm.weight.data_ptr(), norm.variance_epsilon)


def _require_sizes(shape: Shape, weights: Mapping[str, Tensor], layer: Any) -> None:
    """Require weights and norms of the sizes that the kernel's buffers assume."""
    query, key = shape.heads * shape.head, shape.kv_heads * shape.head
    expected = {
        "qkv": (query + 2 * key, shape.hidden),
        "o": (shape.hidden, query),
        "gate_up": (2 * shape.mlp, shape.hidden),
        "down": (shape.hidden, shape.mlp),
    }
    for name, weight in weights.items():
        sizes = list(weight.shape)
        require(tuple(sizes) == expected[name], f"{name} {sizes} is not {list(expected[name])}")
    same = all(tuple(norm.weight.shape) == (shape.hidden,) for norm in _norms(layer))
    require(same, "its norms are not as wide as its rows")
