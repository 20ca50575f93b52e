"""Compute matrix products of served models by our kernel for few rows (backends/cpu/linear.py).

Upstream: sglang/srt/layers/quantization/unquant.py (every unquantised linear layer),
sglang/srt/layers/logits_processor.py (the target's LM head), sglang/srt/models/dspark.py (the
draft's LM head and its plain `nn.Linear` layers). Quantised, LoRA-wrapped and AMX-packed layers,
and products that the kernel does not support, keep upstream's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import linear, packed_weights
from sglang_dspark.backends.cpu.weight_formats import is_narrow, look_up
from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import upstream


def compile_at_load(result: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook: compile the kernel while weights load, not in the first request."""
    linear.prepare()
    return result


def apply_linear(
    original: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """AROUND hook of `UnquantizedLinearMethod.apply`: multiply x [..., K] -> [..., N]."""
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
    """AROUND hook of `_compute_lm_head`: multiply hidden [T, d] -> logits [T, V].

    Upstream's plain branch ignores `embedding_bias`, and a caller that passed `out` copies from
    the result.
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
    """AROUND hook of `project_through_lm_head`: multiply the draft's [R * gamma, d] -> [., V]."""
    if _plain_head(hidden, lm_head):
        return linear.product(hidden, lm_head.weight)
    return original(hidden, lm_head)


def adopt_plain_layers(draft_model: torch.nn.Module) -> None:
    """Put our kernel into the draft's own `nn.Linear` layers, not into those of the target.

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
    """Return whether we compute it: our kernel supports it, or only we can read the weight."""
    if linear.eligible(x, weight):
        return linear.kernel_of(weight) is not None
    return x.dtype is torch.float32 and is_narrow(weight)


def embed(original: Callable[..., Tensor], method: Any, layer: Any, tokens: Tensor) -> Tensor:
    """AROUND hook of `UnquantizedEmbeddingMethod.embedding`: look up tokens [...] -> [..., d]."""
    if packed_weights.holds(layer):
        return look_up(layer.weight, tokens)
    return original(method, layer, tokens)


def _packed_for_amx(layer: Any) -> bool:
    return getattr(layer, "use_intel_amx_backend", False)


_UNQUANTIZED = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod"

SEAMS = (
    Seam(
        name="cpu-packed-target",
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        kind="after",
        hook=packed_weights.pack_target,
        signature="(self)",
        why="a decode step reads every weight: in bfloat16 or int8 it reads fewer bytes",
        device="cpu",
    ),
    Seam(
        name="cpu-packed-embedding",
        target="sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod.embedding",
        kind="around",
        hook=embed,
        signature="(self, layer, input_)",
        why="rows of a packed embedding are float32 again when they are looked up",
        device="cpu",
    ),
    Seam(
        name="cpu-linear-compile",
        target=f"{_UNQUANTIZED}.process_weights_after_loading",
        kind="after",
        hook=compile_at_load,
        signature="(self, layer)",
        why="compiling the kernel belongs to loading, not to the first request",
        device="cpu",
    ),
    Seam(
        name="cpu-linear",
        target=f"{_UNQUANTIZED}.apply",
        kind="around",
        hook=apply_linear,
        signature="(self, layer, x, bias=None)",
        why="F.linear takes twice our time for one row, three times for the 6 of a verify step",
        device="cpu",
    ),
    Seam(
        name="cpu-linear-lm-head",
        target="sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        kind="around",
        hook=compute_lm_head,
        signature="(self, hidden_states, lm_head, embedding_bias=None, *, out=None)",
        why="the LM head is a fifth of the demo target's weights and is multiplied without a layer",
        device="cpu",
    ),
    Seam(
        name="cpu-linear-draft-head",
        target="sglang.srt.models.dspark.project_through_lm_head",
        kind="around",
        hook=project_through_lm_head,
        signature="(hidden, lm_head)",
        why="the draft's base logits take the target's LM head with gamma rows a request",
        device="cpu",
    ),
)
