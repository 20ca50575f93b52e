"""Round exactly to the two small element types: to nearest, ties to the even code, saturating.

E2M1 (OCP Microscaling Formats v1.0, 5.3.3): sign, 2 exponent bits, 1 mantissa bit; magnitudes 0,
0.5, 1, 1.5, 2, 3, 4, 6 for codes 0..7, negative ones for codes 8..15; no infinity, no NaN.
E4M3 (OCP 8-bit Floating Point v1.0): largest 448, no infinity; torch.float8_e4m3fn.

All comparisons are made in float64 on quantities that float64 represents exactly or resolves (a
float32 over a float32 is farther than 2^-31 from any tie that it does not equal). So there is no
second rounding: torch's own conversion from float64 passes through float32 and rounds twice.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
_E4M3_LOWEST_EXPONENT = -6  # of normal numbers; below it the spacing is constant, 2^-9


def encode_e2m1(x: Tensor, scale: Tensor) -> Tensor:
    """Encode x / scale as uint8 codes in 0..15; -0 has the code of +0.

    x: float32. scale: float64 >= 0 of at most 28 significant bits, broadcast; the code of a zero
    scale is 0. It compares |x| with (midpoint x scale), which is exact, and never divides.
    """
    size = x.abs().double()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for low, (a, b) in enumerate(pairwise(E2M1_VALUES)):
        middle = (a + b) / 2 * scale
        above = size >= middle if low % 2 else size > middle  # ties to the even code
        code += above
    code = torch.where(scale > 0, code, torch.zeros_like(code))
    return torch.where((x < 0) & (code > 0), code + 8, code)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Decode codes 0..15 (uint8) to float32 values; code 8 is -0."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=codes.device)
    return values[codes.long()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack [..., K] uint8 in 0..15 into [..., K/2]: column 2i in the low, 2i+1 in the high bits."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo `pack_nibbles`: [..., K/2] uint8 -> [..., K] uint8 in 0..15."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def round_e4m3(x: Tensor) -> Tensor:
    """Round float64 to the nearest torch.float8_e4m3fn, ties to even, saturating at 448."""
    exponent = torch.frexp(x).exponent - 1  # 2^e <= |x| < 2^(e+1)
    spacing = exponent.clamp(min=_E4M3_LOWEST_EXPONENT) - 3
    quantum = torch.ldexp(torch.ones_like(x), spacing)
    nearest = torch.round(x / quantum) * quantum
    return nearest.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)
