"""Define the measurements of expert kernels: layers of real models, routings, and each layer's
least time on a machine (roofline).

Widths from the published configurations: DeepSeek-V4-Flash and -Pro, whose drafter layers have
their experts' shape, and Qwen3-30B-A3B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.kernels.grouped_layout import FP8, Weights

BITS = {"bf16": 16.0, "fp8": 8.0 + 32 / 128**2, "mxfp4": 4.25, "nvfp4": 4.5}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
ROUTINGS = ("uniform", "skewed")


@dataclass(frozen=True)
class Layer:
    """Routed experts: model width d, expert width I, experts E, choices of a token."""

    name: str
    width: int
    inner: int
    experts: int
    top_k: int

    def bytes_of(self, form: str, experts: int) -> float:
        """Return the bytes of `experts` experts' weights in a format."""
        return experts * 3 * self.width * self.inner * BITS[form] / 8


LAYERS = (
    Layer("DeepSeek-V4-Flash", 4096, 2048, 256, 6),
    Layer("DeepSeek-V4-Pro", 7168, 3072, 384, 6),
    Layer("Qwen3-30B-A3B", 2048, 768, 128, 8),
)


@dataclass(frozen=True)
class Ceilings:
    """The limits of a machine, measured or nominal: bytes and operations a second."""

    source: str
    bandwidth: float
    bf16: float
    fp8: float


NOMINAL_H100 = Ceilings("nominal H100 SXM, data sheet", 3.35e12, 989e12, 1979e12)


@dataclass(frozen=True)
class Work:
    """The work of one layer for some tokens: experts read, bytes moved, operations."""

    active: int
    traffic: float
    operations: float

    def least_us(self, ceilings: Ceilings, fp8: bool) -> float:
        """Return the longer time of moving and computing."""
        peak = ceilings.fp8 if fp8 else ceilings.bf16
        return 1e6 * max(self.traffic / ceilings.bandwidth, self.operations / peak)

    def bound(self, ceilings: Ceilings, fp8: bool) -> str:
        """Return `bandwidth` or `compute`."""
        peak = ceilings.fp8 if fp8 else ceilings.bf16
        slower = self.traffic / ceilings.bandwidth > self.operations / peak
        return "bandwidth" if slower else "compute"


def routing(layer: Layer, tokens: int, kind: str, seed: int = 0) -> Tensor:
    """Draw ids [T, top_k] int64, distinct for a token. skewed: popularity decreases as 1 / rank."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.ones(layer.experts)
    if kind == "skewed":
        popularity /= torch.arange(1, layer.experts + 1)
    return torch.multinomial(popularity.expand(tokens, -1), layer.top_k, generator=generator)


def work(layer: Layer, ids: Tensor, form: str) -> Work:
    """Count weights of the chosen experts once; rows of both products in and out, in BF16."""
    active = len(ids.unique())
    rows = 2 * ids.numel() * (2 * layer.width + 2 * layer.inner)
    operations = 2.0 * ids.numel() * 3 * layer.width * layer.inner
    return Work(active, layer.bytes_of(form, active) + rows, operations)


def device_weights(form: str, shape: tuple[int, int, int], device: str) -> Weights:
    """Draw weights [E, N, K] on the device itself: they may be tens of gigabytes."""
    experts, columns, inner = shape
    if form == "bf16":
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return Weights(weight.normal_(std=inner**-0.5))
    packed = inner if form == "fp8" else inner // 2
    codes = torch.randint(0, 256, (experts, columns, packed), dtype=torch.uint8, device=device)
    if form == "fp8":
        codes &= 0xF7  # no NaN; magnitudes of about 50
        deep = (experts, -(-columns // 128), -(-inner // 128))
        return Weights(codes.view(FP8), torch.full(deep, 0.02 * inner**-0.5, device=device))
    if form == "mxfp4":
        scale = torch.full((experts, columns, inner // 32), 119, dtype=torch.uint8, device=device)
        return Weights(codes, scale)
    scale = torch.full((experts, columns, inner // 16), 8.0, device=device).to(FP8)
    return Weights(codes, scale, torch.full((experts,), inner**-0.5 / 24, device=device))
