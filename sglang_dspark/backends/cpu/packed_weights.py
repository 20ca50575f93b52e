"""Pack a served model's weights after loading (`cpu.weights`), and multiply with them.

Upstream: `ModelRunner.load_model` (sglang/srt/model_executor/model_runner.py) leaves
float32 weights, which `UnquantizedLinearMethod` and `UnquantizedEmbeddingMethod`
(layers/quantization/unquant.py) multiply with and look up. Packed in place they keep their names
and shapes; our methods and the fast paths of passes read them by format. Models whose modules read
weights in other ways are not packed. By default weights that are exact in bfloat16, as in most
checkpoints, are stored so: half the bytes, the same numbers.

`should_apply_lm_head_quant_method` (layers/logits_processor.py) makes target and drafts multiply
with an LM head by its method unless that is upstream's own. Quantised, LoRA-wrapped and AMX-packed
layers keep their methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import linear, weight_formats
from sglang_dspark.backends.cpu.fast_paths import log_off, require, supported
from sglang_dspark.backends.cpu.weight_formats import (
    BFLOAT16,
    FLOAT32,
    FORMATS,
    INT8,
    PANELS,
    WeightFormat,
    format_of,
    is_bfloat16,
    is_packed,
    look_up,
    pack,
)
from sglang_dspark.serving import upstream
from sglang_dspark.serving.config import current_config

logger = logging.getLogger(__name__)

TARGETS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_NO_UPDATE = (
    "weights kept as int8 cannot be exchanged in a running server; start it with the new ones, or "
    "with cpu.weights float32 or bfloat16"
)
MTP = "LlamaForCausalLMEagle"
_MARK = "dspark_packed"  # attribute of a module whose weight was packed here


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
            if weight.dtype is torch.float32 or holds(module):
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


def pack_target(runner: Any) -> None:
    """Pack a target, or the layers of an MTP draft, after `ModelRunner.load_model`."""
    model = runner.model
    if not runner.is_draft_worker:
        _pack(model, model, lambda: _require_target(runner, TARGETS))
    elif type(model).__name__ == MTP:
        _pack(model, model.model.layers, lambda: _require_target(runner, (MTP,)))


def pack_draft(draft_model: Any) -> None:
    """Pack the layers of a draft model.

    Upstream also multiplies with its other weights, so our code reads copies (`packed_copy`)."""
    _pack(draft_model, draft_model.layers, lambda: _require_draft(draft_model))


def pack_chain(drafter: nn.Module) -> None:
    """Pack the `nn.Linear` layers of a drafter that runs once a token, and use our kernel there."""
    layers = [layer for layer in drafter.modules() if type(layer) is nn.Linear]
    form = _wanted([layer.weight for layer in layers])
    for layer in layers:
        packed = pack(layer.weight, form)
        if packed is not layer.weight:
            layer.weight = nn.Parameter(packed, requires_grad=False)
            setattr(layer, _MARK, True)
    adopt_plain_layers(drafter)


def take_draft_rows(lm_head: Tensor, ids: Tensor) -> Tensor:
    """Copy rows of an LM head in its format, float32 as bfloat16: ids [n] int64 -> [n, d].

    A drafter that runs once a token reads them as often. Rounded logits change the drafts, which
    are verified with the probabilities that they were drawn from."""
    rows = weight_formats.take_rows(lm_head, ids)
    packs = linear.why_not() is None and format_of(rows) is FLOAT32
    return pack(rows, BFLOAT16) if packs else rows


def packed_copy(weight: Tensor) -> Tensor:
    """Pack a copy of a float32 weight [N, K] (`cpu.weights`); return an unsupported one."""
    return pack(weight, _wanted([weight]))


def form_in(model: nn.Module) -> WeightFormat:
    """Return the format of a model's packed weights."""
    forms = (format_of(module.weight) for module in model.modules() if holds(module))  # type: ignore[arg-type]
    return next(forms, None) or FLOAT32


def holds(layer: nn.Module) -> bool:
    """Return whether a module's weight was packed here, not loaded in bfloat16."""
    return getattr(layer, _MARK, False)


def _wanted(weights: Sequence[Tensor]) -> WeightFormat:
    """Return the configured format; auto: bfloat16 if it is lossless and our kernel reads it.

    Raises DSparkError where the processor cannot multiply such weights.
    """
    name = current_config().cpu.weights
    if name != "auto":
        form = linear.served(FORMATS[name])
    else:
        lossless = bool(weights) and all(is_bfloat16(weight) for weight in weights)
        form = BFLOAT16 if lossless and linear.why_not() is None else FLOAT32
    linear.prepare(form)
    return form


def _require_target(runner: Any, known: Sequence[str]) -> None:
    name = type(runner.model).__name__
    require(name in known, f"only {', '.join(known)} are packed")
    require(runner.dtype is torch.float32, f"the server computes in {runner.dtype}")
    require(runner.server_args.tp_size == 1, "weights are split over ranks")
    require(not runner.server_args.enable_lora, "LoRA adds to float32 weights")
    mapped = runner.server_args.speculative_token_map is not None
    require(
        not (mapped and current_config().cpu.weights == INT8.name),
        "--speculative-token-map takes rows out of the LM head, and int8 rows lie in panels",
    )


def _require_draft(model: Any) -> None:
    require(isinstance(model, upstream.DSparkDraftModel), "only dense drafts are packed")
    stacked = model._stacked_ctx_kv_params()  # upstream caches it
    require(stacked is not None, "keys and values of its context are not one product")
    require(stacked["weight"].dtype is torch.float32, f"it is in {stacked['weight'].dtype}")


def _pack(model: nn.Module, part: nn.Module, require: Callable[[], None]) -> None:
    """Pack the plain weights in a part of a supported model; log why a model is not supported."""
    modules: list[Any] = [module for module in part.modules() if _plain(module)]
    form, name = _wanted([module.weight for module in modules]), type(model).__name__
    if form is FLOAT32 or not supported(f"{form.name} weights of {name}", require):
        return
    before = after = 0
    for module in modules:
        n, k = module.weight.shape
        before += module.weight.nbytes
        if weight_formats.can_pack(module.weight, form):
            module.weight.data = pack(module.weight.data, form)
            setattr(module, _MARK, True)
            if form in PANELS:  # upstream refuses updates of such a model with this text
                module._derived_weight_cache_error = _NO_UPDATE
        after += n * (form if holds(module) else FLOAT32).row_bytes(k)
    logger.info(
        "sglang-dspark: weights of %s are kept as %s: %.3g MB instead of %.3g; they meet %s rows",
        name, form.name, after / 1e6, before / 1e6, linear.activations_for(form),
    )  # fmt: skip


def _plain(module: nn.Module) -> bool:
    """Return whether a module only multiplies with, or looks up in, a float32 weight."""
    method, weight = getattr(module, "quant_method", None), getattr(module, "weight", None)
    if method is None or not isinstance(weight, nn.Parameter):
        return False
    kinds = (upstream.UnquantizedLinearMethod, upstream.UnquantizedEmbeddingMethod)
    other = upstream.other_class(f"the method of a {type(module).__name__}", method, *kinds)
    if other is not None:
        log_off("packed weights", other)
        return False
    return not getattr(module, "use_intel_amx_backend", False) and format_of(weight) is FLOAT32
