"""NVFP4 (NVIDIA, "Pretraining Large Language Models with NVFP4"): E2M1 codes, one E4M3
scale for 16 weights along the input axis, and one float32 scale for each matrix.

global = amax(matrix) / (6 * 448); block scale = round(amax(block) / (6 * global)) in E4M3; code =
round(w / (block scale * global)); w ~ code * block scale * global. A block whose scale rounds to
zero has zero codes; an all-zero matrix has global scale 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.quantisation.layout import (
    TINY,
    Quantised,
    blocks,
    check_columns,
    check_part,
    check_weights,
    largest,
)
from sglang_dspark.quantisation.minifloat import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    encode_e2m1,
    pack_nibbles,
    round_e4m3,
    unpack_nibbles,
)

NAME = "nvfp4"
BLOCK = 16


def quantise(weight: Tensor) -> Quantised:
    """Quantise weights [..., N, K]. Raises DSparkError for NaN, infinity, or K % 16 > 0."""
    check_weights(weight, NAME)
    check_columns(weight.shape[-1], BLOCK, NAME)
    grouped = blocks(weight.float(), BLOCK)  # [..., N, K/16, 16]
    amax = largest(grouped, -1)  # [..., N, K/16]
    top = largest(grouped, (-3, -2, -1))  # [...]
    overall = (top / (E2M1_MAX * E4M3_MAX)).clamp(min=TINY)
    overall = torch.where(top > 0, overall, torch.ones_like(overall))
    wide = overall.double()[..., None, None]
    scales = round_e4m3(amax.double() / (E2M1_MAX * wide))
    codes = encode_e2m1(grouped, (scales.double() * wide)[..., None]).flatten(-2)
    return Quantised(NAME, tuple(weight.shape), pack_nibbles(codes), scales, overall)


def dequantise(q: Quantised) -> Tensor:
    """Restore float32 [..., N, K]: the exact product of code and both scales, rounded once.

    Raises DSparkError if codes or scales do not fit the shape."""
    check_columns(q.shape[-1], BLOCK, NAME)
    packed = (*q.shape[:-1], q.shape[-1] // 2)
    scaled = (*q.shape[:-1], q.shape[-1] // BLOCK)
    codes = unpack_nibbles(check_part(q.payload, packed, torch.uint8, "codes", NAME))
    scales = check_part(q.scales, scaled, torch.float8_e4m3fn, "block scales", NAME)
    overall = check_part(q.global_scale, q.shape[:-2], torch.float32, "global scales", NAME)
    wide = scales.double() * overall.double()[..., None, None]  # [..., N, K/16]
    return (blocks(decode_e2m1(codes), BLOCK).double() * wide[..., None]).flatten(-2).float()
