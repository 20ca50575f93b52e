"""All layers of a model in the short form: what they share, whether they fit, one call for all.

Adapts the layer loops of `LlamaModel.forward` (sglang/srt/models/llama.py) and
`DFlashDraftModel.forward` (models/dflash.py, 0.5.23). With a handful of rows SGLang's modules,
boundaries and linear wrappers cost more than a small layer's arithmetic besides the products, so
whether model, pass and tensors fit is asked once a pass and lean_kernel.py does the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sglang_dspark.serving.cpu import fused_ops, lean_kernel, lean_layer, linear
from sglang_dspark.serving.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.serving.cpu.lean_kernel import Pass, Tables
from sglang_dspark.serving.cpu.lean_layer import LeanLayer

MOST_ROWS = min(linear.MAX_ROWS, fused_ops.MOST_ROWS)
_FLOAT = torch.float32


class LeanStack:
    """The layers of a model, all of one shape, as the kernel's tables."""

    def __init__(self, layers: Sequence[LeanLayer], modules: nn.ModuleList):
        self.layers = tuple(layers)
        self.shape = layers[0].shape
        owner: Mapping[str, Any] = modules._modules
        found = [(owner, name, module) for name, module in owner.items()]
        found += [part for layer in layers for part in layer.parts]
        watched = [each for layer in layers for each in layer.tensors]
        found += [(each.owner, each.name, each.tensor) for each in watched]
        self._owners, self._names, self._objects = zip(*found, strict=True)
        self._tensors = tuple(each.tensor for each in watched)
        self._addresses = [each.address for each in watched]
        self._tables: tuple[tuple[int, ...], Tables] | None = None

    @property
    def unchanged(self) -> bool:
        """Whether no module and no parameter was exchanged or moved since.

        Some 800 look-ups a pass, so the loops are those of `map`, not Python's.
        """
        now = map(dict.get, self._owners, self._names)
        return (
            all(map(operator.is_, now, self._objects))
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
        )

    def tables(self, pool: Any) -> Tables:
        """The kernel's tables for a K/V pool, made anew when its buffers moved."""
        buffers = (*pool.k_buffer, *pool.v_buffer)
        key = tuple(buffer.data_ptr() for buffer in buffers)
        if self._tables is None or self._tables[0] != key:
            self._tables = (key, _tables(self.layers, pool))
        return self._tables[1]


def stack_of(
    modules: nn.ModuleList, resolve: Callable[[Any], LeanLayer | None]
) -> LeanStack | None:
    """The stack of a model's layers; None where one does not fit or shapes differ."""
    found = [resolve(module) for module in modules]
    layers = [layer for layer in found if layer is not None]
    if not layers or len(layers) < len(found) or len({layer.shape for layer in layers}) > 1:
        return None
    return LeanStack(layers, modules)


def _tables(layers: Sequence[LeanLayer], pool: Any) -> Tables:
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
    )


@dataclass(frozen=True)
class Step:
    """One pass: who sits where, the pool's tables, the kernel."""

    now: Pass
    tables: Tables
    kernel: Any


def step_of(
    stack: LeanStack, backend: Any, positions: Tensor, hidden: Any, forward_batch: Any
) -> Step | None:
    """The pass of positions [n], hidden [n, d] and the batch; None if it does not fit."""
    slots = forward_batch.out_cache_loc
    if (
        not isinstance(backend, DsparkCpuAttnBackend)
        or not backend.writes_in_place
        or backend.short is None
        or backend.long is not None
        or torch.is_grad_enabled()
        or forward_batch.forward_mode.is_idle()
        or backend.token_to_kv_pool.layer_transfer_counter is not None
        or not _plain_rows(hidden, stack.shape.hidden)
        or not 0 < hidden.shape[0] <= MOST_ROWS
        or hidden.shape[0] != backend.num_queries
        or not _plain_index(positions, hidden.shape[0])
        or not _plain_index(slots, hidden.shape[0])
    ):
        return None
    plan = backend.short
    now = Pass(positions.numpy(), slots.numpy(), plan.table, plan.requests, plan.trees)
    parallel = backend.threads > 1
    return Step(now, stack.tables(backend.token_to_kv_pool), lean_kernel.layers(parallel))


def run(
    stack: LeanStack, step: Step, hidden: Tensor, captured: Sequence[int] = ()
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """All layers over the embedding [n, d]: last output, residual to add it to, captures.

    captured: layers whose input, all additions made, is wanted. All results are [n, d] and the
    caller's own; `hidden` is not modified.
    """
    rows = hidden.shape[0]
    room = lean_layer.room_of(stack.shape, rows)
    wanted = np.full(len(stack.layers), -1)
    places = [layer for layer in sorted(captured) if layer < len(stack.layers)]
    wanted[places] = np.arange(len(places))
    kept = torch.empty(len(places), rows, stack.shape.hidden)
    block = linear.block_rows(rows)
    step.kernel(step.tables, room, step.now, block, hidden.numpy(), wanted, kept.numpy())
    output, residual = torch.from_numpy(room.mixed), torch.from_numpy(room.carried)
    return output.clone(), residual.clone(), list(kept.unbind())


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
