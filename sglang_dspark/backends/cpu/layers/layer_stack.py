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
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import context_kv, linear, paged_attention
from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.cpu.attention_plan import PlanAddresses
from sglang_dspark.backends.cpu.csrc import operator
from sglang_dspark.backends.cpu.fast_paths import UnsupportedError, find_or_log, require
from sglang_dspark.backends.cpu.layers import layer_spec
from sglang_dspark.backends.cpu.layers.layer_spec import Layer, LayerSpec, Norm
from sglang_dspark.serving import upstream, weight_updates

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
        ("n", ctypes.c_int64),
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

    def __init__(self, layers: Sequence[LayerSpec], norm: Any):
        """Store the layers, and the norm after them. norm: None for a model without one."""
        self.layers, self.shape = layers, layers[0].shape
        self._last = layer_spec.norm_of(norm, self.shape.hidden)
        weights = [each for layer in layers for each in layer.tensors]
        weights += [] if norm is None else [norm.weight]
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
            sizes = len(layers), self.shape.hidden, self.shape.mlp
            self._found = key, _Stack(layers, *sizes, self.layers[0].kernel, self._last)
        return self._found[1]


@lru_cache(maxsize=8)
def _scratch(width: int) -> Tensor:
    """Allocate memory for the most rows of a pass; one pass runs at a time."""
    return torch.empty(linear.MAX_ROWS * width, dtype=torch.float32)


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
    require(len({layer.kernel for layer in layers}) == 1, "its layers differ in format")
    return LayerStack(layers, getattr(model, "norm", None))


def run(
    stack: LayerStack,
    backend: Any,
    positions: Tensor,
    hidden: Any,
    batch: Any,
    captured: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]] | None:
    """Run all layers and the last norm over the embedding [n, d]: normed output, captures.

    backend: of attention, with the pass's plan. positions: [n]. batch: read for its mode and cache
    slots. captured: layers whose input, with all additions, is returned. All results are [n, d]
    and copies of the caller; `hidden` is not modified. None, with no data written, for a pass that
    is not supported.
    """
    if not _supports_pass(stack, backend, positions, hidden, batch):
        return None
    layers = operator("layers", *_ARGUMENTS, returns=ctypes.c_int32)
    assert layers is not None, "a stack is resolved where `linear.prepare` finds a kernel"
    n, width = hidden.shape
    wanted = [layer for layer in sorted(captured) if layer < len(stack.layers)]
    kept, normed = torch.empty(len(wanted), n, width), torch.empty(n, width)
    captures = (ctypes.c_void_p * len(stack.layers))()
    for layer, place in zip(wanted, kept, strict=True):
        captures[layer] = place.data_ptr()
    rows = _Rows(
        n, positions.data_ptr(), batch.out_cache_loc.data_ptr(), hidden.data_ptr(),
        _scratch(stack.shape.scratch_width).data_ptr(), normed.data_ptr(), captures,
    )  # fmt: skip
    plan, heads, widths = backend.plan, stack.shape.heads, 2 * stack.shape.head
    threads = paged_attention.threads_for(backend.threads, plan, heads, widths)
    table = stack.for_pool(backend.token_to_kv_pool)
    paged_attention.require_memory(layers(table, plan.addresses, rows, threads))
    return normed, list(kept.unbind())


def _supports_pass(
    stack: LayerStack, backend: Any, positions: Tensor, hidden: Any, batch: Any
) -> bool:
    return (
        isinstance(backend, DsparkCpuAttnBackend)
        and backend.writes_in_place
        and backend.plan is not None
        and not torch.is_grad_enabled()
        and not batch.forward_mode.is_idle()
        and backend.token_to_kv_pool.layer_transfer_counter is None
        and type(hidden) is Tensor
        and hidden.dtype is torch.float32
        and hidden.shape == (backend.plan.num_queries, stack.shape.hidden)
        and hidden.is_contiguous()
        and 0 < hidden.shape[0] <= linear.MAX_ROWS
        and _is_index(positions, hidden.shape[0])
        and _is_index(batch.out_cache_loc, hidden.shape[0])
    )


def _is_index(index: Any, rows: int) -> bool:
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
    stack = stack_of_model(model, layer_spec.target_layer_of)
    if stack is not None:
        if input_embeds is None:
            input_embeds = model.embed_tokens(input_ids)
        backend, captured = upstream.get_attn_backend(), model.layers_to_capture
        done = run(stack, backend, positions, input_embeds, forward_batch, captured)
        if done is not None:
            return (done[0], upstream.AuxHiddenStateList(done[1])) if done[1] else done[0]
    return original(model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)


def forward_draft(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: Any,
    input_embeds: Tensor | None = None,
    **more: Any,
) -> Any:
    """Run `DFlashDraftModel.forward` (AROUND hook): block tokens or embeddings [n, d] -> h."""
    backend = upstream.get_attn_backend()
    _settle(model, backend, forward_batch)
    stack = stack_of_model(model, layer_spec.draft_layer_of)
    if stack is not None:
        if input_embeds is None and model.embed_tokens is not None:
            input_embeds = model.embed_tokens(input_ids)
        done = run(stack, backend, positions, input_embeds, forward_batch)
        if done is not None:
            return upstream.LogitsProcessorOutput(next_token_logits=None, hidden_states=done[0])
    return original(model, input_ids, positions, forward_batch, input_embeds, **more)


def _settle(model: Any, backend: Any, forward_batch: Any) -> None:
    """Write the context that this pass reads; in a draft block `seq_lens` is its length."""
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
    """Resolve a served model again at its next pass: its weights are updated."""
    for module in (model, getattr(model, "model", None)):
        if module is not None:
            module.__dict__.pop(_STACK, None)


weight_updates.FORGET.append(forget)
