"""Matrix products of served models through our kernel for few rows (backends/cpu/linear.py).

Upstream: sglang/srt/layers/quantization/unquant.py (every unquantised linear layer),
sglang/srt/layers/logits_processor.py (the target's LM head), sglang/srt/models/dspark.py (the
draft's LM head and its plain `nn.Linear` layers). Quantised, LoRA-wrapped and AMX-packed layers,
and every product the kernel does not take, keep upstream's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import linear, packed_weights
from sglang_dspark.backends.cpu.weight_formats import is_narrow, look_up
from sglang_dspark.serving import upstream


def compile_at_load(result: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook: the kernel is compiled while weights load, not in the first request."""
    linear.prepare()
    return result


def apply_linear(
    original: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """AROUND hook of `UnquantizedLinearMethod.apply`: x [..., K] -> [..., N]."""
    if _packed_for_amx(layer) or not _ours(x, layer.weight):
        return original(method, layer, x, bias)
    return linear.product(x, layer.weight, bias)


def compute_lm_head(
    original: Callable[..., Tensor],
    processor: Any,
    hidden_states: Tensor,
    lm_head: Any,
    embedding_bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """AROUND hook of `LogitsProcessor._compute_lm_head`: hidden [T, d] -> logits [T, V].

    Upstream's plain branch ignores `embedding_bias`, and a caller that passed `out` copies from
    whatever comes back.
    """
    if (
        processor.rl_on_policy_target is None
        and not hasattr(lm_head, "set_lora")
        and _plain_head(hidden_states, lm_head)
    ):
        return linear.product(hidden_states, lm_head.weight)
    return original(processor, hidden_states, lm_head, embedding_bias, **kwargs)


def project_through_lm_head(
    original: Callable[..., Tensor], hidden: Tensor, lm_head: Any
) -> Tensor:
    """AROUND hook of `project_through_lm_head`: draft hidden states [R * gamma, d] -> [., V]."""
    if _plain_head(hidden, lm_head):
        return linear.product(hidden, lm_head.weight)
    return original(hidden, lm_head)


def adopt_plain_layers(draft_model: torch.nn.Module) -> None:
    """The draft's own `nn.Linear` layers, target's left out.

    SGLang's linear layers pass `apply_linear`; these call `F.linear` themselves.
    """
    for name, layer in draft_model.named_modules():
        if type(layer) is torch.nn.Linear and not name.startswith(("embed_tokens", "lm_head")):
            layer.forward = linear.forward_of(layer)  # type: ignore[method-assign, assignment]


def _plain_head(hidden: Tensor, lm_head: Any) -> bool:
    return (
        hasattr(lm_head, "weight")
        and not upstream.should_apply_lm_head_quant_method(
            lm_head, getattr(lm_head, "quant_method", None)
        )
        and not _packed_for_amx(lm_head)
        and _ours(hidden, lm_head.weight)
    )


def _ours(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is not upstream's: the kernel takes it, or nobody else reads the weight."""
    if linear.eligible(x, weight):
        return linear.kernel_of(weight) is not None
    return x.dtype is torch.float32 and is_narrow(weight)


def embed(original: Callable[..., Tensor], method: Any, layer: Any, tokens: Tensor) -> Tensor:
    """AROUND hook of `UnquantizedEmbeddingMethod.embedding`: tokens [...] -> [..., d]."""
    if packed_weights.holds(layer):
        return look_up(layer.weight, tokens)
    return original(method, layer, tokens)


def _packed_for_amx(layer: Any) -> bool:
    return getattr(layer, "use_intel_amx_backend", False)
