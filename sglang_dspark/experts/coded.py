"""Hold the experts of a served drafter as the codes and scales of its checkpoint.

Buffers have the names of the checkpoint's tensors, so loading is a copy. If kernels read gate and
up as one matrix, the two are halves of one tensor, and `backends.joined` makes no copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from sglang_dspark.drafter.moe import SharedExperts
from sglang_dspark.errors import DSparkError
from sglang_dspark.experts.backends import ExpertWeights
from sglang_dspark.quantisation import fp8, mxfp4
from sglang_dspark.quantisation.checkpoint import (
    GLOBAL_SCALE,
    SCALE,
    UNQUANTISED,
    empty_codes,
    expert_names,
)
from sglang_dspark.quantisation.layout import Quantised, check_part


class CodedExperts(nn.Module):
    """E SwiGLU experts in a format: gate and up [E, I, d], down [E, d, I]."""

    def __init__(self, name: str, experts: int, inner: int, width: int):
        """name: of the format; experts: E; inner: I; width: d."""
        super().__init__()
        self.format = name
        gate, up = _halves(name, experts, inner, width)
        _hold(self, "gate_proj", gate)
        _hold(self, "up_proj", up)
        _hold(self, "down_proj", empty_codes((experts, width, inner), name))

    def weights(self) -> ExpertWeights:
        """Return the weights for a backend. Raises DSparkError if scales are NaN or infinite."""
        gate, up, down = (_held(self, f"{w}_proj", self.format) for w in ("gate", "up", "down"))
        return ExpertWeights(self.format, codes=(gate, up, down))


class CodedShared(nn.Module):
    """`drafter.moe.SharedExperts` in a format: gate and up [I, d], down [d, I]."""

    def __init__(self, name: str, width: int, inner: int):
        """name: of the format; width: d; inner: I, the joint width."""
        super().__init__()
        self.format = name
        self.gate_proj, self.up_proj, self.down_proj = nn.Module(), nn.Module(), nn.Module()
        gate, up = _halves(name, 1, inner, width)
        _hold(self.gate_proj, "weight", _only(gate))
        _hold(self.up_proj, "weight", _only(up))
        _hold(self.down_proj, "weight", empty_codes((width, inner), name))

    def weights(self) -> ExpertWeights:
        """Return the weights as one expert, E = 1."""
        parts = (self.gate_proj, self.up_proj, self.down_proj)
        gate, up, down = (_as_one(_held(part, "weight", self.format)) for part in parts)
        return ExpertWeights(self.format, codes=(gate, up, down))

    def restored(self, dtype: torch.dtype) -> SharedExperts:
        """Return a `SharedExperts` module with the dequantised values."""
        gate, up, down = (part[0].to(dtype) for part in self.weights().restored())
        with torch.device("meta"):
            module = SharedExperts(gate.shape[1], gate.shape[0])
        for own, values in (
            (module.gate_proj, gate),
            (module.up_proj, up),
            (module.down_proj, down),
        ):
            own.weight = nn.Parameter(values, requires_grad=False)
        return module

    def forward(self, x: Tensor) -> Tensor:
        """Compute [T, d] -> [T, d]: the reference, which dequantises all weights in every call."""
        gate, up, down = (part[0].to(x.dtype) for part in self.weights().restored())
        return linear(silu(linear(x, gate)) * linear(x, up), down)


def require_parts(given: Mapping[str, Tensor], module: nn.Module, name: str) -> None:
    """Raise DSparkError, in one line, if expert weights do not fit the module in the format.

    given: a checkpoint's tensors, by the module's names. Every weight needs all its parts, with the
    shapes and dtypes of the module's buffers. Unquantised weights have no scales and at least two
    bytes an element.
    """
    if name == UNQUANTISED:
        for key in expert_names(given):
            if key + SCALE in given or given[key].element_size() < 2:
                raise DSparkError(
                    f"{key}: codes or scales ({given[key].dtype}) in a drafter whose config.json "
                    "names no expert_format"
                )
        return
    buffers = dict(module.named_buffers())
    for key in expert_names(buffers):
        parts = {key: "codes", key + SCALE: "scales", key + GLOBAL_SCALE: "global scales"}
        if any(part in given for part in parts):
            for part, what in parts.items():
                if part in buffers:
                    own = buffers[part]
                    check_part(
                        given.get(part), tuple(own.shape), own.dtype, what, f"{key} ({name})"
                    )


def _halves(name: str, experts: int, inner: int, width: int) -> tuple[Quantised, Quantised]:
    """Allocate gate and up [E, I, d], as halves of one tensor if `joined` supports the format."""
    if name != mxfp4.NAME and (name != fp8.NAME or inner % fp8.BLOCK):
        return empty_codes((experts, inner, width), name), empty_codes(
            (experts, inner, width), name
        )
    whole = empty_codes((experts, 2 * inner, width), name)
    assert whole.scales is not None  # both formats have scales
    scales = whole.scales.shape[1] // 2
    first, second = (
        Quantised(
            name,
            (experts, inner, width),
            whole.payload[:, i * inner : (i + 1) * inner],
            whole.scales[:, i * scales : (i + 1) * scales],
        )
        for i in range(2)
    )
    return first, second


def _hold(module: nn.Module, key: str, part: Quantised) -> None:
    module.register_buffer(key, part.payload)
    module.register_buffer(key + SCALE, part.scales)
    if part.global_scale is not None:
        module.register_buffer(key + GLOBAL_SCALE, part.global_scale)


def _held(module: nn.Module, key: str, name: str) -> Quantised:
    payload = module.get_buffer(key)
    overall = getattr(module, key + GLOBAL_SCALE, None)
    columns = payload.shape[-1] * (1 if name == fp8.NAME else 2)
    shape = (*payload.shape[:-1], columns)
    return Quantised(name, shape, payload, module.get_buffer(key + SCALE), overall)


def _only(part: Quantised) -> Quantised:
    """Remove the axis of a single expert, [1, N, K] -> [N, K]."""
    overall = None if part.global_scale is None else part.global_scale[0]
    scales = None if part.scales is None else part.scales[0]
    return Quantised(part.format, part.shape[1:], part.payload[0], scales, overall)


def _as_one(part: Quantised) -> Quantised:
    """Add the axis of a single expert, [N, K] -> [1, N, K]."""
    overall = None if part.global_scale is None else part.global_scale[None]
    scales = None if part.scales is None else part.scales[None]
    return Quantised(part.format, (1, *part.shape), part.payload[None], scales, overall)
