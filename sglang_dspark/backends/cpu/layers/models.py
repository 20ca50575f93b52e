"""Decoder layers of Llama and Qwen3 targets and of DSPARK drafts as a few kernel calls each.

Upstream: sglang/srt/models/llama.py, `LlamaModel.forward`, models/qwen3.py,
`Qwen3Model.forward`, and models/dflash.py, `DFlashDraftModel.forward`, whose layer loops
backends/cpu/layers/model.py replaces. Wherever a model, a pass or a tensor is not what the short
form serves, upstream's forward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_dspark.backends.cpu.fast_paths import taken
from sglang_dspark.serving import upstream, weight_updates

_STACK = "dspark_layer_stack"  # attribute of a model


def forward_target(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: Any,
    input_embeds: Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    """AROUND hook of a target's forward: hidden [n, d], with the captured layers' inputs if any.

    Upstream's residual stream is left out: nothing else of a whole, plain stack touches it.
    """
    from sglang_dspark.backends.cpu.layers import model as layer_model
    from sglang_dspark.backends.cpu.layers import support as layer_support

    group = model.pp_group
    stack = None
    if group.is_first_rank and group.is_last_rank:
        stack = stack_of_model(model, layer_support.target_layer_of, layer_support.ending_of)
    if stack is None:
        return original(model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    hidden = model.embed_tokens(input_ids) if input_embeds is None else input_embeds
    step = step_for(stack, positions, hidden, forward_batch)
    if step is None:
        return original(model, input_ids, positions, forward_batch, hidden, pp_proxy_tensors)
    normed, captured = layer_model.run(stack, step, hidden, model.layers_to_capture)
    return (normed, upstream.AuxHiddenStateList(captured)) if captured else normed


def forward_draft(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: Any,
    input_embeds: Tensor | None = None,
    get_embedding: bool = False,
    pp_proxy_tensors: Any = None,
) -> Any:
    """AROUND hook of `DFlashDraftModel.forward`: block tokens or embeddings [n, d] -> h [n, d]."""
    from sglang_dspark.backends.cpu.layers import model as layer_model
    from sglang_dspark.backends.cpu.layers import support as layer_support

    step = None
    _settle(model, forward_batch)
    stack = stack_of_model(model, layer_support.draft_layer_of, layer_support.ending_of)
    if stack is not None:
        if input_embeds is None and model.embed_tokens is not None:
            input_embeds = model.embed_tokens(input_ids)
        step = step_for(stack, positions, input_embeds, forward_batch)
    if stack is None or step is None:
        return original(
            model,
            input_ids,
            positions,
            forward_batch,
            input_embeds,
            get_embedding,
            pp_proxy_tensors,
        )
    assert input_embeds is not None
    hidden, _ = layer_model.run(stack, step, input_embeds)
    return upstream.LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)


def _settle(model: Any, forward_batch: Any) -> None:
    """Have the context written that this pass reads; in a draft block `seq_lens` is its length."""
    from sglang_dspark.backends.cpu import context_kv
    from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend

    backend = upstream.get_attn_backend()
    if isinstance(backend, DsparkCpuAttnBackend) and forward_batch.forward_mode.is_target_verify():
        table = backend.req_to_token_pool.req_to_token
        context_kv.settle(model, table, forward_batch.req_pool_indices, forward_batch.seq_lens)
    else:
        context_kv.settle_all(model)


def stack_of_model(
    model: Any, resolve: Callable[[Any], Any], resolve_ending: Callable[[Any], Any] | None
) -> Any:
    """The model's `LayerStack`, resolved at its first pass and after `forget`; else None.

    resolve_ending: None for models without a last norm.
    """
    from sglang_dspark.backends.cpu.layers import model as layer_model

    found = model.__dict__.get(_STACK, ...)
    if found is ...:
        found = taken(
            f"one call for all layers of {type(model).__name__}",
            lambda: layer_model.stack_of(model, resolve, resolve_ending),
        )
        model.__dict__[_STACK] = found
    return found


def forget(model: Any) -> None:
    """Resolve a served model anew at its next pass: its weights are about to be updated."""
    for module in (model, getattr(model, "model", None)):
        if module is not None:
            module.__dict__.pop(_STACK, None)


weight_updates.BEFORE_UPDATE.append(forget)


def step_for(stack: Any, positions: Tensor, hidden: Any, forward_batch: Any) -> Any:
    from sglang_dspark.backends.cpu.layers import model as layer_model

    return layer_model.step_of(stack, upstream.get_attn_backend(), positions, hidden, forward_batch)
