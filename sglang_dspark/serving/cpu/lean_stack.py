"""All layers of a model run one after the other in the short form of lean_layer.py.

Adapts the layer loops of `LlamaModel.forward` (sglang/srt/models/llama.py) and
`DFlashDraftModel.forward` (models/dflash.py, 0.5.23). Whether model, pass and tensors fit is asked
once a pass, not once a layer: the answers cost as much as a layer's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.serving.cpu import fused_ops, lean_layer, linear, paged
from sglang_dspark.serving.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.serving.cpu.lean_layer import LeanLayer, Step

MOST_ROWS = min(linear.MAX_ROWS, fused_ops.MOST_ROWS)
_FLOAT = torch.float32
Capture = Callable[[Tensor], None]


@dataclass(frozen=True)
class LeanStack:
    """The layers of a model, all of one shape. modules: the container's dict of them."""

    layers: tuple[LeanLayer, ...]
    modules: tuple[tuple[Mapping[str, Any], str, nn.Module], ...]

    @property
    def unchanged(self) -> bool:
        """Whether no layer and nothing in a layer was exchanged or moved since."""
        for owner, name, module in self.modules:
            if owner.get(name) is not module:
                return False
        return all(layer.unchanged for layer in self.layers)


def stack_of(layers: nn.ModuleList, resolve: Callable[[Any], LeanLayer | None]) -> LeanStack | None:
    """The stack of a model's layers; None where one does not fit or shapes differ."""
    owner = layers._modules
    modules = tuple((owner, name, module) for name, module in owner.items() if module is not None)
    found = tuple(resolve(module) for _, _, module in modules)
    lean = tuple(layer for layer in found if layer is not None)
    if not lean or len(lean) < len(found) or len({layer.shape for layer in lean}) > 1:
        return None
    return LeanStack(lean, modules)


def step_of(backend: Any, positions: Tensor, hidden: Tensor, forward_batch: Any) -> Step | None:
    """The pass of positions [n], hidden [n, d] and the batch; None if it does not fit."""
    slots, rows = forward_batch.out_cache_loc, hidden.shape[0]
    if (
        not isinstance(backend, DsparkCpuAttnBackend)
        or not backend.writes_in_place
        or backend.short is None
        or backend.long is not None
        or torch.is_grad_enabled()
        or forward_batch.forward_mode.is_idle()
        or backend.token_to_kv_pool.layer_transfer_counter is not None
        or not 0 < rows <= MOST_ROWS
        or rows != backend.num_queries
        or not _plain_index(positions, rows)
        or not _plain_index(slots, rows)
    ):
        return None
    pool = backend.token_to_kv_pool
    return Step(
        plan=backend.short,
        positions=positions.numpy(),
        slots=slots.numpy(),
        keys=pool.k_buffer,
        values=pool.v_buffer,
        first_layer=pool.start_layer,
        attend=paged.compiled(backend.threads > 1),
    )


def fits(stack: LeanStack, hidden: Any) -> bool:
    """Whether hidden [n, d] is what the first layer's kernels read."""
    return (
        type(hidden) is Tensor
        and hidden.dtype is _FLOAT
        and hidden.dim() == 2
        and hidden.shape[1] == stack.layers[0].shape.hidden
        and hidden.is_contiguous()
    )


def run(
    stack: LeanStack,
    step: Step,
    hidden: Tensor,
    captured: Collection[int] = (),
    capture: Capture | None = None,
) -> tuple[Tensor, Tensor]:
    """All layers over the embedding [n, d]: the last output and the residual it is to be added to.

    captured: layers whose input, all additions made, goes to `capture`; it is borrowed, valid
    during the call only. Both results [n, d] are the caller's own; `hidden` is not modified.
    """
    room = lean_layer.room_of(stack.layers[0].shape, hidden.shape[0])
    output, residual = hidden.numpy(), None
    for number, layer in enumerate(stack.layers):
        entered = lean_layer.run(layer, step, room, output, residual)
        if number in captured and capture is not None:
            capture(torch.from_numpy(entered))
        output, residual = room.mixed, room.carried
    return torch.from_numpy(output).clone(), torch.from_numpy(residual).clone()


def _plain_index(index: Any, rows: int) -> bool:
    return (
        isinstance(index, Tensor)
        and index.dtype == torch.int64
        and index.shape == (rows,)
        and index.is_contiguous()
    )
