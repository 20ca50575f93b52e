"""FP8 as in DeepSeek-V3 (technical report, 3.3.2): E4M3 codes, one float32 scale for each block of
128 x 128 weights, and for activations one for each group of 1 x 128. Blocks at the lower and right
edge may be smaller.

scale = amax / 448 in float32, code = round(w / scale), w ~ code * scale; an all-zero block has
scale 1. In DeepSeek's checkpoints the scales are called `weight_scale_inv`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.quantisation.layout import (
    TINY,
    Quantised,
    check_part,
    check_weights,
    largest,
)
from sglang_dspark.quantisation.minifloat import E4M3_MAX, round_e4m3

NAME = "fp8"
BLOCK = 128
CODES = torch.float8_e4m3fn


def _scale(amax: Tensor) -> Tensor:
    """Compute the float32 scales of blocks from their largest magnitudes."""
    scale = (amax.float() / E4M3_MAX).clamp(min=TINY)
    return torch.where(amax > 0, scale, torch.ones_like(scale))


def _tiles(size: int) -> int:
    return -(-size // BLOCK)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of scales of weights [..., N, K]: [..., ceil(N/128), ceil(K/128)]."""
    return (*shape[:-2], _tiles(shape[-2]), _tiles(shape[-1]))


def _spread(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Expand scales [..., n, k] to one per weight [..., N, K]."""
    wide = scales.repeat_interleave(BLOCK, -2)[..., :rows, :]
    return wide.repeat_interleave(BLOCK, -1)[..., :columns]


def quantise(weight: Tensor) -> Quantised:
    """Quantise weights [..., N, K] by 128 x 128 blocks. Raises DSparkError if any is not finite."""
    check_weights(weight, NAME)
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiled = padded.unflatten(-2, (_tiles(rows), BLOCK)).unflatten(-1, (_tiles(columns), BLOCK))
    scales = _scale(largest(tiled, (-3, -1)))  # [..., n, k]
    codes = round_e4m3(weight.double() / _spread(scales, rows, columns).double())
    return Quantised(NAME, tuple(weight.shape), codes, scales)


def dequantise(q: Quantised) -> Tensor:
    """Restore float32 [..., N, K]. Raises DSparkError if codes or scales do not fit the shape."""
    codes = check_part(q.payload, q.shape, CODES, "codes", NAME)
    scales = check_part(q.scales, scale_shape(q.shape), torch.float32, "scales", NAME)
    return codes.float() * _spread(scales, *q.shape[-2:])


def quantise_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise activations [M, K] by groups of 1 x 128, as a product quantises them on the fly.

    Returns codes [M, K] float8_e4m3fn and scales [M, ceil(K/128)] float32. Raises DSparkError for
    NaN or infinite activations.
    """
    check_weights(x, "fp8 activations")
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -columns % BLOCK))
    scales = _scale(largest(padded.unflatten(-1, (_tiles(columns), BLOCK)), -1))
    wide = scales.repeat_interleave(BLOCK, -1)[..., :columns]
    return round_e4m3(x.double() / wide.double()), scales
