"""Pack a served model's weights after loading, in the format of `cpu.weights`.

Upstream: `ModelRunner.load_model` (sglang/srt/model_executor/model_runner.py) leaves
float32 weights, which `UnquantizedLinearMethod` and `UnquantizedEmbeddingMethod` multiply with and
look up. Packed in place they keep their names and shapes; weight_methods.py and the fast paths of
passes read them by format. Models whose modules read weights in other ways are not packed. By
default weights that are exact in bfloat16, as in most checkpoints, are stored so: half the bytes,
the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import linear, weight_formats
from sglang_dspark.backends.cpu.fast_paths import UnsupportedError, log_off, require, supported
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


def pack_target(runner: Any) -> None:
    """Pack a target, or the layers of an MTP draft, after `ModelRunner.load_model`."""
    model = runner.model
    if not runner.is_draft_worker:
        _pack_as_configured(model, model, lambda: _require_target(runner, TARGETS))
    elif type(model).__name__ == MTP:
        _pack_as_configured(model, model.model.layers, lambda: _require_target(runner, (MTP,)))


def pack_draft(draft_model: Any) -> None:
    """Pack the layers of a draft model.

    Upstream also multiplies with its other weights, so our code reads copies (`packed_copy`)."""
    _pack_as_configured(draft_model, draft_model.layers, lambda: _require_draft(draft_model))


def pack_chain(drafter: nn.Module) -> None:
    """Pack the `nn.Linear` layers of a drafter that runs once a token."""
    layers = [layer for layer in drafter.modules() if type(layer) is nn.Linear]
    form = _wanted([layer.weight for layer in layers])
    linear.prepare_for(form)
    for layer in layers:
        if form is not FLOAT32 and weight_formats.can_pack(layer.weight, form):
            layer.weight = nn.Parameter(pack(layer.weight, form), requires_grad=False)
            setattr(layer, _MARK, True)


def take_draft_rows(lm_head: Tensor, ids: Tensor) -> Tensor:
    """Copy rows of an LM head in its format, float32 as bfloat16: ids [n] int64 -> [n, d].

    A drafter that runs once a token reads them as often. Rounded logits change the drafts, which
    are verified with the probabilities that they were drawn from."""
    rows = weight_formats.take_rows(lm_head, ids)
    packs = linear.why_not() is None and format_of(rows) is FLOAT32
    return pack(rows, BFLOAT16) if packs and weight_formats.can_pack(rows, BFLOAT16) else rows


def packed_copy(weight: Tensor) -> Tensor:
    """Pack a copy of a float32 weight [N, K] (`cpu.weights`); return an unsupported one."""
    form = _wanted([weight])
    linear.prepare_for(form)
    stays = form is FLOAT32 or not weight_formats.can_pack(weight, form)
    return weight if stays else pack(weight, form)


def _pack_as_configured(model: nn.Module, part: nn.Module, require: Callable[[], None]) -> None:
    """Pack the plain weights in a part of a supported model; log why a model is not supported."""
    form = _wanted([module.weight for module in part.modules() if _plain(module)])  # type: ignore[misc]
    if form is not FLOAT32 and supported(f"{form.name} weights of {type(model).__name__}", require):
        _pack(part, form, type(model).__name__)


def form_in(model: nn.Module) -> WeightFormat:
    """Return the format of a model's packed weights."""
    packed = next((module for module in model.modules() if holds(module)), None)
    if packed is None:
        return FLOAT32
    form = format_of(packed.weight)  # type: ignore[arg-type]
    assert form is not None
    return form


def holds(layer: nn.Module) -> bool:
    """Return whether a module's weight was packed here, not loaded in bfloat16."""
    return getattr(layer, _MARK, False)


def embedded(embedding: nn.Module, tokens: Tensor) -> Tensor:
    """Look up rows of an embedding in float32: tokens [n] int64 -> [n, d]."""
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    return look_up(weight, tokens) if is_packed(weight) else weight.index_select(0, tokens)


def _wanted(weights: Sequence[Tensor]) -> WeightFormat:
    """Return the configured format; auto: bfloat16 if it is lossless and our kernel reads it."""
    name = _configured()
    if name != "auto":
        return linear.served(FORMATS[name])
    lossless = bool(weights) and all(is_bfloat16(weight) for weight in weights)
    return BFLOAT16 if lossless and linear.why_not() is None else FLOAT32


def _configured() -> str:
    return current_config().cpu.weights


def _require_target(runner: Any, known: Sequence[str]) -> None:
    name = type(runner.model).__name__
    require(name in known, f"only {', '.join(known)} are packed")
    require(runner.dtype is torch.float32, f"the server computes in {runner.dtype}")
    require(runner.server_args.tp_size == 1, "weights are split over ranks")
    require(not runner.server_args.enable_lora, "LoRA adds to float32 weights")
    mapped = runner.server_args.speculative_token_map is not None
    require(
        not (mapped and _configured() == INT8.name),
        "--speculative-token-map takes rows out of the LM head, and int8 rows lie in panels",
    )


def _require_draft(model: Any) -> None:
    require(isinstance(model, upstream.DSparkDraftModel), "only dense drafts are packed")
    stacked = model._stacked_ctx_kv_params()  # upstream caches it
    if stacked is None:
        raise UnsupportedError("keys and values of its context are not one product")
    require(stacked["weight"].dtype is torch.float32, f"it is in {stacked['weight'].dtype}")


def _pack(part: nn.Module, form: WeightFormat, name: str) -> None:
    """Pack every product's and embedding's weight that the format supports. name: the model's."""
    before = after = 0
    for module in part.modules():
        if not _plain(module):
            continue
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        n, k = weight.shape
        before += weight.nbytes
        if weight_formats.can_pack(weight, form):
            weight.data = pack(weight.data, form)
            setattr(module, _MARK, True)
            if form in PANELS:  # upstream refuses updates of such a model with this text
                module._derived_weight_cache_error = _NO_UPDATE  # type: ignore[assignment]
        after += n * (form if holds(module) else FLOAT32).row_bytes(k)
    linear.prepare_for(form)
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
    return (
        other is None
        and not getattr(module, "use_intel_amx_backend", False)
        and format_of(weight) is FLOAT32
    )
