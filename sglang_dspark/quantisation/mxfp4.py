"""MXFP4 (OCP Microscaling Formats v1.0, 5.1, 6.3): E2M1 codes, one E8M0 scale for 32 weights along
the input axis.

The scale of a block is 2^(floor(log2 amax) - 2), 2 being the exponent of E2M1's largest power of
two; it is stored with a bias of 127 in a byte, 255 is NaN. Weights beyond 6 scales saturate. An
all-zero block has the smallest scale, 2^-127 (byte 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.quantisation.layout import (
    Quantised,
    blocks,
    check_columns,
    check_part,
    check_weights,
    largest,
)
from sglang_dspark.quantisation.minifloat import (
    decode_e2m1,
    encode_e2m1,
    pack_nibbles,
    unpack_nibbles,
)

NAME = "mxfp4"
BLOCK = 32
_BIAS = 127
_NAN = 255
_EMAX = 2


def decode_e8m0(codes: Tensor) -> Tensor:
    """Decode scale bytes to float64 powers of two, exactly; 255 is NaN."""
    scale = torch.ldexp(torch.ones_like(codes, dtype=torch.float64), codes.int() - _BIAS)
    return scale.masked_fill(codes == _NAN, float("nan"))


def quantise(weight: Tensor) -> Quantised:
    """Quantise weights [..., N, K]. Raises DSparkError for NaN, infinity, or K % 32 > 0."""
    check_weights(weight, NAME)
    check_columns(weight.shape[-1], BLOCK, NAME)
    grouped = blocks(weight.float(), BLOCK)  # [..., K/32, 32]
    amax = largest(grouped, -1)
    exponent = torch.frexp(amax).exponent - 1 - _EMAX + _BIAS
    scales = torch.where(amax > 0, exponent.clamp(0, _NAN - 1), 0).to(torch.uint8)
    codes = encode_e2m1(grouped, decode_e8m0(scales)[..., None]).flatten(-2)
    return Quantised(NAME, tuple(weight.shape), pack_nibbles(codes), scales)


def dequantise(q: Quantised) -> Tensor:
    """Restore float32 [..., N, K]. Raises DSparkError if codes or scales do not fit the shape.

    Values are infinite if code x scale overflows float32 (scale bytes 253, 254)."""
    check_columns(q.shape[-1], BLOCK, NAME)
    packed = (*q.shape[:-1], q.shape[-1] // 2)
    scaled = (*q.shape[:-1], q.shape[-1] // BLOCK)
    codes = unpack_nibbles(check_part(q.payload, packed, torch.uint8, "codes", NAME))
    scales = decode_e8m0(check_part(q.scales, scaled, torch.uint8, "scales", NAME))
    return (blocks(decode_e2m1(codes), BLOCK).double() * scales[..., None]).flatten(-2).float()
