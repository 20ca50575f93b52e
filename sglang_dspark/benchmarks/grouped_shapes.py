"""Make odd shapes of the grouped GEMMs, for tests and benchmarks: groups of every kind, widths
that no tile divides, padding after the groups; and random operands of any format for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dspark.kernels.grouped_layout import (
    FP4_GROUPS,
    FP8,
    SCALE_BLOCK,
    GroupedOperands,
    Weights,
)

FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4")
KINDS = (  # activations x weights
    "bf16 x bf16",
    "bf16 x fp8",
    "fp8 x fp8",
    "bf16 x mxfp4",
    "fp8 x mxfp4",
    "bf16 x nvfp4",
    "fp8 x nvfp4",
)


class GroupedShape(NamedTuple):
    """A ragged product. counts: rows of each expert; padding: rows after them; N and K."""

    name: str
    counts: tuple[int, ...]
    padding: int
    columns: int
    inner: int

    @property
    def rows(self) -> int:
        """Return M, padding included."""
        return sum(self.counts) + self.padding

    def offsets(self, device: str = "cpu") -> Tensor:
        """Return offsets [E+1] int32."""
        return torch.tensor([0, *self.counts], dtype=torch.int32).cumsum(0).int().to(device)


def grouped_shapes() -> Iterator[GroupedShape]:
    """Yield shapes small enough for an interpreter and ragged enough for a kernel."""
    yield GroupedShape("one token", (0, 0, 1, 0), 0, 128, 128)
    yield GroupedShape("decode, top-2 of 8", (1, 0, 3, 2, 0, 1, 4, 1), 0, 96, 160)
    yield GroupedShape("all to one expert", (0, 0, 37, 0), 0, 130, 128)
    yield GroupedShape("first and last empty", (0, 17, 16, 0), 0, 64, 72)
    yield GroupedShape("unaligned everything", (5, 33, 1), 0, 201, 135)
    yield GroupedShape("padding behind", (3, 0, 20), 13, 48, 264)
    yield GroupedShape("padding only", (0, 0), 9, 33, 40)
    yield GroupedShape("one expert, exact tiles", (64,), 0, 128, 256)
    yield GroupedShape("large groups", (150, 0, 110), 6, 136, 144)
    yield GroupedShape("no tokens", (0, 0, 0), 0, 128, 128)
    yield GroupedShape("no columns", (2, 3), 0, 0, 64)


def random_weights(
    generator: torch.Generator, form: str, shape: tuple[int, int, int], device: str = "cpu"
) -> Weights:
    """Draw weights [E, N, K] of a format, as codes and scales: all codes, and experts whose
    sizes differ by orders of magnitude. K is a multiple of the format's group."""
    experts, columns, inner = shape
    if form == "bf16":
        sizes = 10 ** torch.randn(experts, 1, 1, generator=generator)
        weight = torch.randn(shape, generator=generator) * sizes
        return Weights(weight.bfloat16().to(device))
    if form == "fp8":
        codes = torch.randn(shape, generator=generator).mul(60).clamp(-448, 448).to(FP8)
        deep = (experts, -(-columns // SCALE_BLOCK), -(-inner // SCALE_BLOCK))
        scale = 10 ** torch.randn(deep, generator=generator) / 1000
        return Weights(codes.to(device), scale.to(device))
    packed = (experts, columns, inner // 2)
    codes = torch.randint(0, 256, packed, generator=generator, dtype=torch.uint8)
    groups = (experts, columns, inner // FP4_GROUPS[form])
    if form == "mxfp4":
        powers = torch.randint(116, 126, groups, generator=generator, dtype=torch.uint8)
        return Weights(codes.to(device), powers.to(device))
    scale = torch.rand(groups, generator=generator).mul(448).to(FP8)
    overall = 10 ** torch.randn(experts, generator=generator) / 10000
    return Weights(codes.to(device), scale.to(device), overall.to(device))


def random_rows(
    generator: torch.Generator, form: str, shape: tuple[int, ...], device: str = "cpu"
) -> tuple[Tensor, Tensor | None]:
    """Draw activations [..., K] in bf16 without scales or in fp8 with them."""
    x = torch.randn(shape, generator=generator)
    if form == "bf16":
        return x.bfloat16().to(device), None
    scale = torch.rand(*shape[:-1], -(-shape[-1] // SCALE_BLOCK), generator=generator).add_(0.01)
    return x.mul(60).clamp(-448, 448).to(FP8).to(device), scale.to(device)


def grouped_operands(
    shape: GroupedShape, kind: str, out_dtype: torch.dtype = torch.bfloat16
) -> GroupedOperands:
    """Draw operands of a shape, K rounded up to the format's group. Padding rows are NaN, which
    must not reach any result."""
    rows, form = kind.split(" x ")
    generator = torch.Generator().manual_seed(len(shape.counts) + shape.inner)
    group = FP4_GROUPS.get(form, 1)
    inner = -(-shape.inner // group) * group
    weights = random_weights(generator, form, (len(shape.counts), shape.columns, inner))
    x, x_scale = random_rows(generator, rows, (shape.rows, inner))
    padding = x if x_scale is None else x_scale
    padding[sum(shape.counts) :] = float("nan")
    return GroupedOperands(
        x, weights.weight, shape.offsets(), x_scale, weights.weight_scale, out_dtype,
        weights.weight_global,
    )  # fmt: skip
