"""Run all decoder layers of a model in one compiled call, in place of upstream's loops.

Upstream: sglang/srt/models/{llama,qwen2,qwen3}.py, `forward` of the model class, and
models/dflash.py, `DFlashDraftModel.forward`. With a handful of rows SGLang's modules, boundaries
and linear wrappers cost more than a small layer's arithmetic without the products. So a pass and
its tensors are checked once and csrc/layers.cpp does the rest. An unsupported model, pass or tensor
uses upstream's forward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import context_kv, linear, paged_attention
from sglang_dspark.backends.cpu.attention_plan import AttentionPlan, PlanAddresses
from sglang_dspark.backends.cpu.csrc import operator
from sglang_dspark.backends.cpu.fast_paths import UnsupportedError, find_or_log, require
from sglang_dspark.backends.cpu.layers import layer_spec
from sglang_dspark.backends.cpu.layers.layer_spec import Layer, LayerSpec, Norm
from sglang_dspark.serving import upstream, weight_updates

_FLOAT = torch.float32
_STACK = "dspark_layer_stack"  # attribute of a model


class _Stack(ctypes.Structure):
    """All layers in the form of csrc/layers.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "mlp")),
        ("matmul", ctypes.c_void_p),
        ("last", Norm),
    )


class _Rows(ctypes.Structure):
    """The rows of a pass in the form of csrc/layers.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "block")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "hidden", "scratch")),
        ("normed", ctypes.c_void_p),
        ("captures", ctypes.POINTER(ctypes.c_void_p)),
    )


_ARGUMENTS = (
    *(ctypes.POINTER(each) for each in (_Stack, PlanAddresses, _Rows)),
    ctypes.c_int64,
)


class LayerStack:
    """The layers of a model, all of one shape, and its last norm, by address.

    New values in the same memory are read directly; where parameters are replaced the stack is
    resolved again (`forget`).
    """

    def __init__(self, layers: Sequence[LayerSpec], last_norm: Any):
        """Store layers and last norm by address. last_norm: None for a model without one."""
        self.layers = tuple(layers)
        self.shape = layers[0].shape
        weights = [each for layer in layers for each in layer.tensors]
        self._last_norm = layer_spec.norm_at(last_norm)
        if last_norm is not None:
            weights.append(last_norm.weight)
        # The kernel reads by address: this memory stays allocated while the stack exists.
        self._storages = [each.untyped_storage() for each in weights]
        self._found: tuple[tuple[int, ...], _Stack] | None = None

    def for_pool(self, pool: Any) -> _Stack:
        """Return the layers with the buffers of a K/V pool, rebuilt if the buffers moved."""
        key = tuple(map(Tensor.data_ptr, [*pool.k_buffer, *pool.v_buffer]))
        if self._found is None or self._found[0] != key:
            layers = (Layer * len(self.layers))(*(each.layer for each in self.layers))
            for layer, spec in zip(layers, self.layers, strict=True):
                index = spec.index - pool.start_layer
                layer.attention.keys = pool.k_buffer[index].data_ptr()
                layer.attention.values = pool.v_buffer[index].data_ptr()
            entry = self.layers[0].kernel.entry
            hidden, mlp = self.shape.hidden, self.shape.mlp
            found = _Stack(layers, len(layers), hidden, mlp, entry, self._last_norm)
            self._found = key, found
        return self._found[1]


@lru_cache(maxsize=8)
def _scratch(width: int) -> Tensor:
    """Allocate memory for the most rows of a pass; one pass runs at a time."""
    return torch.empty(linear.MAX_ROWS * width, dtype=_FLOAT)


def stack_of(model: Any, resolve: Callable[[Any], LayerSpec]) -> LayerStack:
    """Resolve `model.layers` and, if it has one, `model.norm` after them.

    Raises UnsupportedError where one is not supported.
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
    last_norm = getattr(model, "norm", None)
    if last_norm is not None:
        layer_spec.require_last_norm(last_norm, layers[0].shape.hidden)
    return LayerStack(layers, last_norm)


@dataclass(frozen=True)
class StackPass:
    """One pass: its positions and cache slots [n], the layers, and the threads of attention."""

    positions: Tensor
    slots: Tensor
    plan: AttentionPlan
    stack: _Stack
    threads: int


def pass_of(
    stack: LayerStack, backend: Any, positions: Tensor, hidden: Any, forward_batch: Any
) -> StackPass | None:
    """Describe the pass of positions [n], hidden [n, d] and the batch; None if unsupported."""
    # Patches import this module while plugins load; the backend's base class cannot load then.
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
    heads, widths = stack.shape.heads, 2 * stack.shape.head
    threads = paged_attention.threads_for(backend.threads, plan, heads, widths)
    return StackPass(positions, slots, plan, stack.for_pool(backend.token_to_kv_pool), threads)


def run(
    stack: LayerStack, step: StackPass, hidden: Tensor, captured: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """Run all layers and the last norm over the embedding [n, d]: normed output, captures.

    captured: layers whose input, with all additions, is returned. All results are [n, d] and
    copies of the caller; `hidden` is not modified.
    """
    layers = operator("layers", *_ARGUMENTS, returns=ctypes.c_int32)
    assert layers is not None, "a stack is resolved where `linear.prepare` finds a kernel"
    n, width = hidden.shape
    wanted = [layer for layer in sorted(captured) if layer < len(stack.layers)]
    kept, normed = torch.empty(len(wanted), n, width), torch.empty(n, width)
    captures = (ctypes.c_void_p * len(stack.layers))()
    for layer, place in zip(wanted, kept, strict=True):
        captures[layer] = place.data_ptr()
    rows = _Rows(
        n, linear.block_rows(n), step.positions.data_ptr(), step.slots.data_ptr(),
        hidden.data_ptr(), _scratch(stack.shape.scratch_width).data_ptr(), normed.data_ptr(),
        captures,
    )  # fmt: skip
    paged_attention.require_memory(layers(step.stack, step.plan.addresses, rows, step.threads))
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

    Upstream's residual stream is not returned: no other code reads it in a whole, plain stack.
    """
    group = model.pp_group
    stack = None
    if group.is_first_rank and group.is_last_rank:
        stack = stack_of_model(model, layer_spec.target_layer_of)
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
    stack = stack_of_model(model, layer_spec.draft_layer_of)
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


def stack_of_model(model: Any, resolve: Callable[[Any], LayerSpec]) -> Any:
    """Return the model's `LayerStack`, resolved at its first pass and after `forget`; or None."""
    found = model.__dict__.get(_STACK, ...)
    if found is ...:
        found = find_or_log(
            f"one call for all layers of {type(model).__name__}", lambda: stack_of(model, resolve)
        )
        model.__dict__[_STACK] = found
    return found


def forget(model: Any) -> None:
    """Resolve a served model again at its next pass: its weights are about to be updated."""
    for module in (model, getattr(model, "model", None)):
        if module is not None:
            module.__dict__.pop(_STACK, None)


weight_updates.BEFORE_UPDATE.append(forget)


def step_for(stack: Any, positions: Tensor, hidden: Any, forward_batch: Any) -> Any:
    """Call `pass_of` with the attention backend of the pass in progress."""
    return pass_of(stack, upstream.get_attn_backend(), positions, hidden, forward_batch)
