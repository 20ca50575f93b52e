"""Resolve decoder layers for the fast path: sizes, and addresses of weights.

Reads upstream's modules (sglang/srt/models/{llama,llama_eagle,qwen2,qwen3,dflash}.py) once a layer,
and again when weights are updated (layer_stack.py). Layers with other dtypes, quantisation, LoRA,
shards, hooks or biases (except of queries, keys and values) are not supported; they use upstream's
code, and the log names the reason (fast_paths.py).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import linear, paged_attention
from sglang_dspark.backends.cpu.fast_paths import UnsupportedError, require, require_class
from sglang_dspark.backends.cpu.packed_weights import LinearMethod
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
    def qkv(self) -> int:
        """Count the outputs of the product for queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head

    @property
    def scratch_width(self) -> int:
        """Count the floats that csrc/layers.cpp needs for the rows between its operators."""
        return 4 * self.hidden + self.qkv + self.heads * self.head + 3 * self.mlp


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

    kernel: address of the matrix kernel. layer: without the addresses of keys and values. index: of
    the layer in the pool's buffers, from the pool's start_layer. tensors: the layer's, whose memory
    stays allocated while addresses in it are used.
    """

    shape: Shape
    kernel: int
    layer: Layer
    index: int
    tensors: tuple[Tensor, ...]


def target_layer_of(layer: Any) -> LayerSpec:
    """Resolve a layer of a Llama, Qwen2 or Qwen3 target, with its weights in place.

    Raises UnsupportedError where it is not supported, as the other functions here do."""
    kinds = {  # layer: its attention and its MLP
        upstream.LlamaDecoderLayer: (upstream.LlamaAttention, upstream.LlamaMLP),
        upstream.Qwen2DecoderLayer: (upstream.Qwen2Attention, upstream.Qwen2MLP),
        upstream.Qwen3DecoderLayer: (upstream.Qwen3Attention, upstream.Qwen2MLP),
    }
    require_class("it", layer, *kinds)
    _require_plain(layer, *kinds[type(layer)])
    if type(layer) is not upstream.LlamaDecoderLayer:
        trained = upstream.get_exec().deterministic.rl_on_policy_target
        require(trained is None, "a policy in training uses it")
    return _resolve(layer)


def eagle_layer_of(layer: Any) -> LayerSpec:
    """Resolve a layer of an MTP (EAGLE) draft, whose first layer has no norm of its input."""
    require_class("it", layer, upstream.EagleDecoderLayer)
    _require_plain(layer, upstream.LlamaAttention, upstream.LlamaMLP)
    first = layer.self_attn.attn.layer_id == 0
    bare = getattr(layer, "input_layernorm", None) is None
    require(first == bare, "its first layer alone has no norm of its input")
    return _resolve(layer)


def draft_layer_of(layer: Any) -> LayerSpec:
    """Resolve a layer of a DFlash-style draft."""
    require_class("it", layer, upstream.DFlashDecoderLayer)
    attention = layer.self_attn
    require_class("its attention", attention, upstream.DFlashAttention)
    require_class("its MLP", layer.mlp, upstream.DFlashMLP)
    require(layer.attention_conv is None and layer.mlp_conv is None, "it has convolutions")
    require(attention.v_scale is None, "its values are scaled")
    require(attention.attention_sink_bias is None, "its attention has sinks")
    require(attention.qkv_proj.bias is None, "qkv_proj has a bias")  # context_kv.py adds none
    return _resolve(layer)


def _require_plain(layer: Any, attention: type[Any], mlp: type[Any]) -> None:
    """Require a plain layer of a target or MTP draft; attention, mlp: classes of its parts."""
    require_class("its attention", layer.self_attn, attention)
    require_class("its MLP", layer.mlp, mlp)
    fused = layer.mlp.dual_gemm.mode is not None
    require(not fused, "its gate and up products are fused by another kernel")
    require(not layer.mlp.activation_quant.enabled, "its activations are quantised")
    for boundary in (layer.attn_boundary, layer.ffn_boundary):
        require(boundary.declaration.update.is_plain_add, "its residual is no plain sum")


def _resolve(layer: Any) -> LayerSpec:
    ranks, attention, mlp = upstream.get_parallel().tp_size, layer.self_attn, layer.mlp
    require(linear.prepare() is not None, str(linear.why_not()))
    require(ranks == 1, f"its layers are split over {ranks} ranks")
    require(not hooked(layer), "a module has hooks")
    _require_classes(attention, mlp)
    radix, table = _attention(attention.attn), rotary_table(attention.rotary_emb)
    sizes = {attention.rotary_emb.head_size, radix.width, radix.value_width}
    require(len(sizes) == 1, f"its heads have the sizes {sorted(sizes)}")
    heads = radix.heads, radix.kv_heads, radix.width
    shape = Shape(attention.qkv_proj.input_size, *heads, mlp.down_proj.input_size)
    products, kernel = _products(attention, mlp, shape)
    norms = (
        norm_of(getattr(layer, "input_layernorm", None), shape.hidden),
        norm_of(layer.post_attention_layernorm, shape.hidden),
        norm_of(getattr(attention, "q_norm", None), shape.head),
        norm_of(getattr(attention, "k_norm", None), shape.head),
    )
    bias = _bias_at(attention.qkv_proj.bias, shape)
    found = Layer(*products, bias, *norms, table.data_ptr(), table.shape[1], radix)
    tensors = (*layer.parameters(), *layer.buffers())
    return LayerSpec(shape, kernel, found, attention.attn.layer_id, tensors)


def _require_classes(attention: Any, mlp: Any) -> None:
    """Require upstream's classes of the modules in attention and MLP."""
    for name, part, kind in (
        ("attn", attention.attn, upstream.RadixAttention),
        ("act_fn", mlp.act_fn, upstream.SiluAndMul),
        ("qkv_proj", attention.qkv_proj, upstream.QKVParallelLinear),
        ("o_proj", attention.o_proj, upstream.RowParallelLinear),
        ("gate_up_proj", mlp.gate_up_proj, upstream.MergedColumnParallelLinear),
        ("down_proj", mlp.down_proj, upstream.RowParallelLinear),
    ):
        require_class(f"its {name}", part, kind)


def _attention(radix: Any) -> Attention:
    """Return the attention of a `RadixAttention`, without a cache."""
    require(not radix.is_cross_attention, "its attention is crossed")
    require(not radix.logit_cap, "its attention's logits are capped")
    require(radix.quant_method is None, "its K/V cache is quantised")
    return Attention(
        heads=radix.tp_q_head_num,
        kv_heads=radix.tp_k_head_num,
        width=radix.qk_head_dim,
        value_width=radix.v_head_dim,
        window=paged_attention.sliding_window_of(radix),
        scale=radix.scaling,
        causal=radix.attn_type != upstream.AttentionType.ENCODER_ONLY,
    )


def rotary_table(rotary: Any) -> Tensor:
    """Return the cosines and sines of a plain rotary embedding by position, [context, rotary]."""
    plain = (upstream.RotaryEmbedding, upstream.Llama3RotaryEmbedding)
    require_class("its rotary embedding", rotary, *plain)
    require(rotary.is_neox_style, "its rotary embedding turns adjacent pairs")
    table: Tensor = rotary.cos_sin_cache
    require(table.dtype == _FLOAT and table.is_contiguous(), "its rotary table is not float32")
    return table


def _products(attention: Any, mlp: Any, shape: Shape) -> tuple[list[Product], int]:
    """Return a layer's products in the order of `Layer`, and the address of their one kernel."""
    d, f = shape.hidden, shape.mlp
    weights = [
        _plain_weight("qkv_proj", attention.qkv_proj, [shape.qkv, d]),
        _plain_weight("o_proj", attention.o_proj, [d, shape.heads * shape.head]),
        _plain_weight("gate_up_proj", mlp.gate_up_proj, [2 * f, d]),
        _plain_weight("down_proj", mlp.down_proj, [d, f]),
    ]
    kernels = [linear.kernel_of(weight) for weight in weights]
    if kernels[0] is None or any(each is not kernels[0] for each in kernels):
        raise UnsupportedError("its weights are not all of one format that our kernel reads")
    products = [Product(each.data_ptr(), linear.threads_for(*each.shape)) for each in weights]
    return products, kernels[0].entry


def _plain_weight(name: str, layer: Any, sizes: list[int]) -> Tensor:
    """Return the weight [N, K] of an unquantised linear layer; sizes: N and K."""
    kinds = (LinearMethod, upstream.UnquantizedLinearMethod)
    require_class(f"the method of {name}", layer.quant_method, *kinds)
    require(name == "qkv_proj" or layer.bias is None, f"{name} has a bias")
    require(not getattr(layer, "use_intel_amx_backend", False), f"{name} is packed for AMX")
    weight: Tensor = layer.weight
    found = list(weight.shape)
    require(found == sizes, f"{name} {found} is not {sizes}")
    return weight


def _bias_at(bias: Tensor | None, shape: Shape) -> int | None:
    """Return the address of the bias of queries, keys and values; None without a bias."""
    if bias is None:
        return None
    plain = bias.dtype is _FLOAT and bias.shape == (shape.qkv,) and bias.is_contiguous()
    require(plain, f"the bias of qkv_proj is {bias.dtype} {list(bias.shape)}")
    return bias.data_ptr()


def hooked(module: nn.Module) -> bool:
    """Return whether a module or a part of it has forward hooks."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def norm_of(norm: Any, width: int) -> Norm:
    """Describe an RMSNorm of rows [n, width] by its address; `norm` None: no norm."""
    if norm is None:
        return Norm()
    require_class("a norm", norm, upstream.RMSNorm)
    require(not hooked(norm), "a norm has hooks")
    weight, over = norm.weight, norm.override_orig_dtype
    require(weight.dtype == _FLOAT and over in (None, _FLOAT), "a norm does not compute in float32")
    require(weight.shape == (width,) and weight.is_contiguous(), "a norm is not that of its rows")
    require(norm.variance_size_override is None, "a norm covers a part of its row")
    return Norm(weight.data_ptr(), norm.variance_epsilon)
