"""Run all decoder layers of a model in one compiled call, in the place of upstream's loops.

Upstream: sglang/srt/models/llama.py, `LlamaModel.forward`, models/qwen3.py, `Qwen3Model.forward`,
and models/dflash.py, `DFlashDraftModel.forward`. With a handful of rows SGLang's modules,
boundaries and linear wrappers cost more than a small layer's arithmetic besides the products, so
a pass and its tensors are checked once and layer_kernel.py does the rest. A model, a pass or a
tensor that it does not support keeps upstream's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.backends.cpu import context_kv, linear
from sglang_dspark.backends.cpu.fast_paths import UnsupportedError, find_or_log, require
from sglang_dspark.backends.cpu.layers import layer_kernel, layer_spec
from sglang_dspark.backends.cpu.layers.layer_kernel import Pass, Tables
from sglang_dspark.backends.cpu.layers.layer_spec import NO_NORM, Ending, LayerSpec, Norm
from sglang_dspark.serving import upstream, weight_updates

_FLOAT = torch.float32
_STACK = "dspark_layer_stack"  # attribute of a model


class LayerStack:
    """The layers of a model, all of one shape, and its last norm as the kernel's tables.

    New values in the same memory need no notice; where parameters are exchanged the stack is
    resolved anew (`forget`).
    """

    def __init__(self, layers: Sequence[LayerSpec], ending: Ending | None):
        """ending: None for a model without a norm behind its layers."""
        self.layers = tuple(layers)
        self.shape = layers[0].shape
        self.last_norm = NO_NORM if ending is None else ending.norm
        weights = [each for layer in layers for each in layer.tensors]
        if ending is not None:
            weights.append(ending.weight)
        # The kernel reads by address: this memory stays allocated as long as the stack.
        self._storages = [each.untyped_storage() for each in weights]
        self._tables: tuple[tuple[int, ...], Tables] | None = None
        self._wanted: dict[tuple[int, ...], tuple[NDArray[np.int64], int]] = {}

    def wanted(self, captured: Sequence[int]) -> tuple[NDArray[np.int64], int]:
        """Return each layer's index among the captures, [L], -1 for none, and their number."""
        key = tuple(captured)
        if key not in self._wanted:
            places = [layer for layer in sorted(key) if layer < len(self.layers)]
            found = np.full(len(self.layers), -1)
            found[places] = np.arange(len(places))
            self._wanted[key] = found, len(places)
        return self._wanted[key]

    def tables(self, pool: Any) -> Tables:
        """Return the kernel's tables for a K/V pool, rebuilt when its buffers moved."""
        key = tuple(map(Tensor.data_ptr, [*pool.k_buffer, *pool.v_buffer]))
        if self._tables is None or self._tables[0] != key:
            self._tables = (key, _tables(self.layers, self.last_norm, pool))
        return self._tables[1]


def stack_of(
    model: Any,
    resolve: Callable[[Any], LayerSpec],
    resolve_ending: Callable[[Any], Ending] | None,
) -> LayerStack:
    """Resolve `model.layers` and `model.norm`. Raises UnsupportedError where one is not supported.

    resolve_ending: None for a model that has no norm behind its layers.
    """
    layers = []
    for index, module in enumerate(model.layers):
        try:
            layers.append(resolve(module))
        except UnsupportedError as unfit:
            raise UnsupportedError(f"layer {index}: {unfit}") from None
    require(layers, "it has no layers")
    require(len({layer.shape for layer in layers}) == 1, "its layers differ in shape")
    require(len({layer.kernel.entry for layer in layers}) == 1, "its layers differ in format")
    if resolve_ending is None:
        return LayerStack(layers, None)
    ending, width = resolve_ending(model), layers[0].shape.hidden
    require(ending.weight.shape == (width,), "its last norm is not as wide as its rows")
    return LayerStack(layers, ending)


def _tables(layers: Sequence[LayerSpec], last_norm: Norm, pool: Any) -> Tables:
    addresses, numbers, fractions = [], [], []
    for layer in layers:
        products = (layer.qkv, layer.o, layer.gate_up, layer.down)
        index = layer.index - pool.start_layer
        buffers = (layer.cos_sin, pool.k_buffer[index], pool.v_buffer[index])
        addresses.append(
            [product.address for product in products]
            + [norm.address for norm in layer.norms]
            + [buffer.data_ptr() for buffer in buffers]
        )
        threads = [product.threads for product in products]
        numbers.append([*threads, int(layer.causal), layer.window, *layer.cos_sin.shape])
        fractions.append([*(norm.epsilon for norm in layer.norms), layer.scale])
    shape, slots = layers[0].shape, pool.k_buffer[0].shape[0]
    return Tables(
        np.array(addresses, dtype=np.int64),
        np.array(numbers, dtype=np.int64),
        np.array(fractions, dtype=np.float64),
        (shape.hidden, shape.heads, shape.kv_heads, shape.head, shape.mlp, slots),
        layers[0].kernel.entry,
        last_norm.address,
    )


@dataclass(frozen=True)
class Step:
    """One pass: its rows and requests, the tables, and the thread pool that attention uses."""

    now: Pass
    tables: Tables
    sharing: tuple[int, int]


def step_of(
    stack: LayerStack, backend: Any, positions: Tensor, hidden: Any, forward_batch: Any
) -> Step | None:
    """Describe the pass of positions [n], hidden [n, d] and the batch; None if unsupported."""
    # Patches import this module while plugins load, when the backend's base class cannot be.
    from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend

    slots = forward_batch.out_cache_loc
    if (
        not isinstance(backend, DsparkCpuAttnBackend)
        or not backend.writes_in_place
        or backend.plan is None
        or torch.is_grad_enabled()
        or forward_batch.forward_mode.is_idle()
        or backend.token_to_kv_pool.layer_transfer_counter is not None
        or not _plain_rows(hidden, stack.shape.hidden)
        or not 0 < hidden.shape[0] <= linear.MAX_ROWS
        or hidden.shape[0] != backend.plan.num_queries
        or not _plain_index(positions, hidden.shape[0])
        or not _plain_index(slots, hidden.shape[0])
    ):
        return None
    plan = backend.plan
    now = Pass(positions.numpy(), slots.numpy(), plan.table, plan.requests, plan.trees)
    return Step(now, stack.tables(backend.token_to_kv_pool), backend.sharing)


def run(
    stack: LayerStack, step: Step, hidden: Tensor, captured: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """Run all layers and the last norm over the embedding [n, d]: normed output, captures.

    captured: layers whose input, all additions made, is wanted. All results are [n, d] and the
    caller's own; `hidden` is not modified.
    """
    rows, width = hidden.shape
    buffers = layer_spec.buffers_for(stack.shape, rows)
    wanted, count = stack.wanted(captured)
    kept, normed = torch.empty(count, rows, width), torch.empty(rows, width)
    layer_kernel.layers(
        step.tables, step.sharing, buffers, step.now, linear.block_rows(rows), hidden.numpy(),
        wanted, kept.numpy(), stack.last_norm.epsilon, normed.numpy(),
    )  # fmt: skip
    return normed, list(kept.unbind())


def _plain_rows(rows: Any, width: int) -> bool:
    return (
        type(rows) is Tensor
        and rows.dtype is _FLOAT
        and rows.dim() == 2
        and rows.shape[1] == width
        and rows.is_contiguous()
    )


def _plain_index(index: Any, rows: int) -> bool:
    return (
        isinstance(index, Tensor)
        and index.dtype == torch.int64
        and index.shape == (rows,)
        and index.is_contiguous()
    )


def forward_target(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: Any,
    input_embeds: Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    """Run a target's layers (AROUND hook): hidden [n, d], with captured layers' inputs if any.

    Upstream's residual stream is not returned: nothing else of a whole, plain stack touches it.
    """
    group = model.pp_group
    stack = None
    if group.is_first_rank and group.is_last_rank:
        stack = stack_of_model(model, layer_spec.target_layer_of, layer_spec.ending_of)
    if stack is None:
        return original(model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    hidden = model.embed_tokens(input_ids) if input_embeds is None else input_embeds
    step = step_for(stack, positions, hidden, forward_batch)
    if step is None:
        return original(model, input_ids, positions, forward_batch, hidden, pp_proxy_tensors)
    normed, captured = run(stack, step, hidden, model.layers_to_capture)
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
    """Run `DFlashDraftModel.forward` (AROUND hook): block tokens or embeddings [n, d] -> h."""
    step = None
    _settle(model, forward_batch)
    stack = stack_of_model(model, layer_spec.draft_layer_of, layer_spec.ending_of)
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
    hidden, _ = run(stack, step, input_embeds)
    return upstream.LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)


def _settle(model: Any, forward_batch: Any) -> None:
    """Write the context that this pass reads; in a draft block `seq_lens` is its length."""
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
    """Return the model's `LayerStack`, resolved at its first pass and after `forget`; or None.

    resolve_ending: None for models without a last norm.
    """
    found = model.__dict__.get(_STACK, ...)
    if found is ...:
        found = find_or_log(
            f"one call for all layers of {type(model).__name__}",
            lambda: stack_of(model, resolve, resolve_ending),
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
    """`step_of` with the attention backend of the pass in progress."""
    return step_of(stack, upstream.get_attn_backend(), positions, hidden, forward_batch)
