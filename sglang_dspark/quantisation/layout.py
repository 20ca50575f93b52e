"""The quantised tensor shared by all formats of expert weights, and checks of its parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.errors import DSparkError

TINY = torch.finfo(torch.float32).tiny  # smallest normal number: no scale is denormal


@dataclass(frozen=True)
class Quantised:
    """Weights [..., N, K] (out, in) in one of the formats.

    payload: codes [..., N, K], or [..., N, K/2] uint8 with the even column in the low four bits.
    scales: one per block of the format; None for BF16.
    global_scale: [...] float32, one per matrix (NVFP4 only).
    shape: of the weights.
    """

    format: str
    shape: tuple[int, ...]
    payload: Tensor
    scales: Tensor | None = None
    global_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of codes and scales together."""
        parts = (self.payload, self.scales, self.global_scale)
        return sum(p.numel() * p.element_size() for p in parts if p is not None)


def check_weights(weight: Tensor, name: str) -> None:
    """Raise DSparkError unless these are finite floating-point matrices [..., N, K]."""
    if weight.dim() < 2 or not weight.dtype.is_floating_point:
        raise DSparkError(
            f"{name}: expected floating-point weights [..., out, in], found "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
    bad = int((~weight.isfinite()).sum())
    if bad:
        raise DSparkError(
            f"{name}: {bad} of {weight.numel()} weights are NaN or infinite; they cannot be "
            "quantised, look for the training step that made them"
        )


def check_columns(columns: int, block: int, name: str) -> None:
    """Raise DSparkError unless the input width is a whole number of blocks."""
    if columns % block:
        raise DSparkError(
            f"{name}: input width {columns} is no multiple of the format's block of {block}; "
            "pad the weights with zero columns"
        )


def check_part(
    part: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, what: str, name: str
) -> Tensor:
    """Return the part. Raises DSparkError if it is missing or has another shape or dtype."""
    if part is None:
        raise DSparkError(f"{name}: {what} are missing; the file is incomplete")
    if tuple(part.shape) != shape or part.dtype != dtype:
        raise DSparkError(
            f"{name}: {what} are {tuple(part.shape)} {part.dtype}, the weights' shape asks for "
            f"{shape} {dtype}; they belong to other weights"
        )
    return part


def blocks(weight: Tensor, size: int) -> Tensor:
    """Split [..., K] into [..., K/size, size]."""
    return weight.unflatten(-1, (weight.shape[-1] // size, size))


def largest(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Return the largest magnitude over `dims`; zero without elements, which amax rejects."""
    if x.numel():
        return x.abs().amax(dims)
    return x.sum(dims)
