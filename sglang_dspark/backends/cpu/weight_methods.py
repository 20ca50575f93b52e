"""Multiply with, and look up in, the unquantised weights of a loaded model by our kernels.

Upstream: sglang/srt/layers/quantization/unquant.py has a method for linear layers and one for
embeddings; `should_apply_lm_head_quant_method` (layers/logits_processor.py) makes target and drafts
multiply with an LM head by its method unless that is upstream's own. Quantised, LoRA-wrapped and
AMX-packed layers keep their methods.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import linear, packed_weights
from sglang_dspark.backends.cpu.weight_formats import is_packed, look_up
from sglang_dspark.serving import upstream


class LinearMethod(upstream.UnquantizedLinearMethod):
    """Multiply by our kernel; by `F.linear` where it does not support the product."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [..., K] -> [..., N]."""
        return linear.product(x, layer.weight, bias)


class EmbeddingMethod(upstream.UnquantizedEmbeddingMethod):
    """Multiply with an LM head, and look up an embedding, in any of our formats."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [T, d] -> [T, V]; upstream's plain branch ignores the bias, too."""
        return linear.product(x, layer.weight)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Look up tokens [...] -> [..., d] float32."""
        if is_packed(layer.weight):
            return look_up(layer.weight, input_)
        found: Tensor = super().embedding(layer, input_)
        return found


def adopt(model: nn.Module) -> None:
    """Replace the methods of a loaded and packed model."""
    for module in model.modules():
        kind = type(getattr(module, "quant_method", None))
        if getattr(module, "use_intel_amx_backend", False):
            continue
        if kind is upstream.UnquantizedLinearMethod:
            module.quant_method = LinearMethod()
        elif kind is upstream.UnquantizedEmbeddingMethod:
            weight: Any = module.weight
            if weight.dtype is torch.float32 or packed_weights.holds(module):
                module.quant_method = EmbeddingMethod()


def adopt_plain_layers(draft_model: nn.Module, shared: tuple[str, ...] = ()) -> None:
    """Use our kernel in a draft's own `nn.Linear` layers, which call `F.linear` themselves.

    shared: prefixes of the names of modules that the draft may share with its target.
    """
    for name, layer in draft_model.named_modules():
        if type(layer) is nn.Linear and not name.startswith(shared):
            layer.forward = partial(_multiply, layer)  # type: ignore[method-assign]


def _multiply(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear.product(x, layer.weight, layer.bias)


def is_quantised(head: Any) -> bool:
    """Return whether an LM head multiplies by a quantisation method, which is not ours."""
    method = getattr(head, "quant_method", None)
    ours = type(method) is EmbeddingMethod
    quantised: bool = not ours and upstream.should_apply_lm_head_quant_method(head, method)
    return quantised
