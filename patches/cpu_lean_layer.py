"""Decoder layers of Llama models as a few kernel calls (serving/cpu/lean_layer.py).

Upstream: sglang/srt/models/llama.py, `LlamaDecoderLayer.forward`, and the residual stream of
sglang/srt/layers/layer_boundary/residual/stream.py (0.5.23). Wherever a layer, a pass or the
stream's state is not what the short form serves, upstream's forward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.patches.seam import Seam

_LAYER = "dspark_lean_layer"  # attribute of a decoder layer
_STEP = "dspark_lean_step"  # attribute of an attention backend


def forward_lean(
    original: Callable[..., Any],
    layer: Any,
    positions: Tensor,
    hidden_states: Any,
    forward_batch: Any,
    capture_output: Any = None,
) -> Any:
    """AROUND hook of `LlamaDecoderLayer.forward`: hidden [n, d] -> [n, d], pending in the stream.

    As upstream, the returned output is yet to be added to the stream's residual, and a capture
    gets the layer's input after the previous layer's output was added.
    """
    from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD

    from sglang_dspark.serving.cpu import lean_layer

    stream = forward_batch.residual_stream
    lean = _lean_of(layer)
    if lean is None or not _arrives_plain(stream, hidden_states, capture_output, lean):
        return original(layer, positions, hidden_states, forward_batch, capture_output)
    step = _step_for(positions, hidden_states, forward_batch)
    if step is None:
        return original(layer, positions, hidden_states, forward_batch, capture_output)
    output, residual, entered = lean_layer.run(lean, step, hidden_states, stream.residual)
    if capture_output is not None:
        capture_output(entered)
    stream.write(residual)
    return stream.record(output, PLAIN_ADD)


def _lean_of(layer: Any) -> Any:
    """The layer's `LeanLayer`, resolved again when something in the layer was exchanged."""
    from sglang_dspark.serving.cpu import lean_fit

    found = layer.__dict__.get(_LAYER, ...)
    if found is ... or (found is not None and not found.unchanged):
        found = layer.__dict__[_LAYER] = lean_fit.lean_layer_of(layer)
    return found


def _step_for(positions: Tensor, hidden: Tensor, forward_batch: Any) -> Any:
    from sglang.srt.model_executor.forward_context import get_attn_backend

    from sglang_dspark.serving.cpu import lean_layer

    backend = get_attn_backend()
    cached = getattr(backend, _STEP, None)
    step = lean_layer.step_of(backend, positions, hidden, forward_batch, cached)
    if step is not cached:
        setattr(backend, _STEP, step)
    return step


def _arrives_plain(stream: Any, hidden: Any, capture: Any, lean: Any) -> bool:
    """Whether the stream is at its start, or owes exactly `hidden` to its residual."""
    if type(hidden) is not Tensor or stream is None:
        return False
    shape = hidden.shape
    if (
        hidden.dtype is not torch.float32
        or len(shape) != 2
        or shape[1] != lean.shape.hidden
        or not hidden.is_contiguous()
    ):
        return False
    pending, residual = stream.pending, stream.residual
    if pending is None:
        # A capture at the very start wants the embedding, which upstream hands over itself.
        return residual is None and capture is None
    return (
        residual is not None
        and pending.owed is None
        and pending.value is hidden
        and pending.update.is_plain_add
        and residual.dtype is torch.float32
        and residual.shape == shape
        and residual.is_contiguous()
    )


SEAMS = (
    Seam(
        name="cpu-lean-layer",
        target="sglang.srt.models.llama.LlamaDecoderLayer.forward",
        kind="around",
        hook=forward_lean,
        signature="(self, positions, hidden_states, forward_batch, capture_output=None)",
        why="SGLang's Python around a small layer's kernels costs as much as their arithmetic",
        device="cpu",
    ),
)
