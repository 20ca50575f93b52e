"""Register the experts' backends that require a server, and choose one for a drafter's layers.

Our compiled CPU kernels, SGLang's fused MoE and its Humming runner (humming_experts.py).

SGLang's: sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe.py, `fused_moe`, BF16
weights or FP8 ones with 128 x 128 scales. Written from its source; it has not been run on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch
from torch import Tensor

from sglang_dspark import __version__
from sglang_dspark.backends.cpu import expert_ops, linear
from sglang_dspark.backends.cpu.linear import LANES
from sglang_dspark.backends.cpu.threads import chosen_threads
from sglang_dspark.backends.moe import humming_experts
from sglang_dspark.common.machine import cpu_description
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.moe import Experts, SharedExperts
from sglang_dspark.errors import DSparkError
from sglang_dspark.experts.backends import (
    Backend,
    Call,
    ExpertWeights,
    ExpertWorkload,
    joined,
    needs,
    register,
)
from sglang_dspark.experts.coded import CodedExperts, CodedShared
from sglang_dspark.experts.dispatch import Chooser, RoutedExperts
from sglang_dspark.experts.gpu_backends import on_cuda
from sglang_dspark.experts.times import TimesKey, load_or_measure
from sglang_dspark.quantisation import bf16, fp8
from sglang_dspark.serving import upstream

logger = logging.getLogger(__name__)


def _compiled_refusal(s: ExpertWorkload) -> str | None:
    if s.device != "cpu":
        return "for CPUs"
    if s.dtype != torch.float32 or s.width % LANES or s.inner % LANES:
        return f"needs float32 and widths in multiples of {LANES}"
    if s.graph:
        return "computes on the host, which a graph cannot"
    most = linear.MAX_ROWS
    return f"for up to {most} tokens" if s.tokens > most else None


def _no_kernel() -> str | None:
    return None if linear.prepare() is not None else "this CPU has no fused multiply-add of ours"


def _prepare_compiled(weights: ExpertWeights) -> Call:
    gate, up, down = (part.float() for part in weights.restored())
    return expert_ops.CompiledExperts(gate, up, down)


def _sglang_refusal(s: ExpertWorkload) -> str | None:
    if s.format not in (bf16.NAME, fp8.NAME):
        return "takes bf16 and fp8 weights"
    if s.format == fp8.NAME and s.inner % fp8.BLOCK:
        return f"fp8 experts of width {s.inner}, no multiple of {fp8.BLOCK}"
    return on_cuda(s, (8, 9) if s.format == fp8.NAME else (8, 0))


def _prepare_sglang(weights: ExpertWeights) -> Call:
    gate, up, down = weights.coded()
    gate_up, how = joined(gate, up), upstream.MoeRunnerConfig(inplace=False)
    scaled = weights.format == fp8.NAME
    block = [fp8.BLOCK, fp8.BLOCK] if scaled else None

    def call(x: Tensor, ids: Tensor, own: Tensor) -> Tensor:
        unread = torch.empty(len(x), len(gate_up.payload), device=x.device)  # router's logits
        out = upstream.fused_moe(
            x.bfloat16().contiguous(),
            gate_up.payload,
            down.payload,
            upstream.StandardTopKOutput(own, ids.int(), unread),
            how,
            use_fp8_w8a8=scaled,
            w1_scale=gate_up.scales,
            w2_scale=down.scales,
            block_shape=block,
        )
        return out.to(x.dtype)

    return call


register(Backend("compiled", _no_kernel, _compiled_refusal, _prepare_compiled), before="triton")
register(Backend("sglang", needs("sglang"), _sglang_refusal, _prepare_sglang), before="flashinfer")
register(humming_experts.BACKEND, before="flashinfer")


def weights_of(e: Experts | CodedExperts, shape: DrafterConfig) -> ExpertWeights:
    """Return a layer's routed experts. Raises DSparkError for NaN or infinite weights."""
    if isinstance(e, CodedExperts):
        return e.weights()
    values = (e.gate_proj.detach(), e.up_proj.detach(), e.down_proj.detach())
    return ExpertWeights(shape.expert_format, values)


def workload_of(shape: DrafterConfig, device: str, dtype: torch.dtype) -> ExpertWorkload:
    """Describe a drafter's layers and their device."""
    return ExpertWorkload(
        device,
        shape.expert_format,
        shape.num_experts,
        shape.moe_intermediate_size,
        shape.hidden_size,
        shape.experts_per_token,
        dtype=dtype,
        capability=torch.cuda.get_device_capability() if device == "cuda" else None,
    )


def key_of(workload: ExpertWorkload) -> TimesKey:
    """Return the key of times measured here: every property they depend on."""
    if workload.device == "cuda":
        device = torch.cuda.get_device_name()
    else:
        device = f"{cpu_description()}; {chosen_threads()} compute threads"
    versions = f"sglang {version('sglang')}, torch {version('torch')}, ours {__version__}"
    return TimesKey.of(workload, device, versions)


@dataclass(frozen=True)
class RoutedLayers:
    """The routed experts of all layers, ready to be called; in_graphs: whether a captured pass may
    contain these calls."""

    layers: tuple[RoutedExperts, ...]
    in_graphs: bool


def routed_layers(
    found: Sequence[ExpertWeights],
    shape: DrafterConfig,
    ranks: int = 1,
    in_graphs: bool = False,
    dtype: torch.dtype | None = None,
) -> RoutedLayers:
    """Make the routed experts of each layer, by the backends that `chooser_for` chooses.

    dtype: of the rows. in_graphs: draft passes are to be captured. If no backend can be, that is
    logged in one line and the result is for eager passes. Raises DSparkError if no backend supports
    those either.
    """
    chooser = chooser_for(found[0], shape, ranks, in_graphs, dtype)
    layers = tuple(RoutedExperts(weights, chooser) for weights in found)
    try:
        for layer in layers:
            layer.warm_up()
    except DSparkError as error:
        if not in_graphs:
            raise
        logger.warning("sglang-dspark: draft passes run outside graphs: %s", error)
        return routed_layers(found, shape, ranks, dtype=dtype)
    return RoutedLayers(layers, in_graphs)


def chooser_for(
    weights: ExpertWeights,
    shape: DrafterConfig,
    ranks: int = 1,
    in_graphs: bool = False,
    dtype: torch.dtype | None = None,
) -> Chooser:
    """Choose by times of this machine, measured on one layer's weights at the first start; if they
    cannot be measured, by the order of preference, which is logged.

    dtype: of the rows; None: that of the values, float32 if there are only codes.

    Several ranks use the order of preference: ranks that measure at the same time
    disturb each other, and all must make the same choice.
    """
    if dtype is None:
        dtype = weights.values[0].dtype if weights.values else torch.float32
    held, inner, _ = weights.shape
    workload = replace(
        workload_of(shape, weights.device, dtype),
        experts=held,
        inner=inner,
        absent=shape.num_experts - held,
        graph=in_graphs,
    )
    if ranks > 1:
        return Chooser(workload)
    try:
        times = load_or_measure(weights, workload, key_of(workload))
    except DSparkError as error:
        logger.warning("sglang-dspark: experts are chosen without measured times: %s", error)
        return Chooser(workload)
    if times.timings:
        logger.info("sglang-dspark: times of experts: %s", times)
    return Chooser(workload, times)


class SharedByCodes:
    """Shared experts as one routed expert of every token, by a backend that reads codes."""

    def __init__(self, routed: RoutedExperts):
        self.routed = routed

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, d] -> [T, d]."""
        ids = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
        return self.routed(x, ids, torch.ones(len(x), 1, device=x.device))


class SharedRestored:
    """Shared experts whose values are restored at the first call, and kept."""

    def __init__(self, shared: CodedShared, dtype: torch.dtype):
        self.shared, self.dtype = shared, dtype
        self.module: SharedExperts | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, d] -> [T, d]."""
        if self.module is None:
            self.module = self.shared.restored(self.dtype)
        return self.module(x)


def shared_layers(
    found: Sequence[CodedShared], shape: DrafterConfig, in_graphs: bool, dtype: torch.dtype
) -> list[SharedByCodes | SharedRestored]:
    """Make the shared experts of each layer, by the first backend that reads codes on this device;
    without one they are restored, on a GPU at once.

    in_graphs: the passes are captured. dtype: of the rows.
    """
    weights = [shared.weights() for shared in found]
    _, inner, _ = weights[0].shape
    workload = replace(
        workload_of(shape, weights[0].device, dtype),
        experts=1,
        inner=inner,
        top_k=1,
        graph=in_graphs,
    )
    restored: list[SharedByCodes | SharedRestored] = [SharedRestored(s, dtype) for s in found]
    if workload.device == "cpu":
        return restored
    chooser = Chooser(workload)
    try:
        if chooser.name(1) != "torch":
            routed = [RoutedExperts(each, chooser) for each in weights]
            for layer in routed:
                layer.warm_up()
            return [SharedByCodes(layer) for layer in routed]
    except DSparkError as error:
        logger.warning("sglang-dspark: shared experts are restored: %s", error)
    for each in restored:
        each(torch.zeros(1, shape.hidden_size, dtype=dtype, device=workload.device))
    return restored
