"""Compute prefix survival: the chance that drafts 1..j are all accepted (paper, 3.2.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def survival(confidence: Tensor) -> Tensor:
    """Return the prefix survival a_j = prod_{i<=j} c_i (paper, 3.2.2).

    confidence: [..., gamma] in [0, 1], calibrated (dimensionless). Returns [..., gamma] float32.
    The product runs left to right: a factor of at most 1 never raises a float32 number, so a_j is
    non-increasing in the executed arithmetic. A scan in another order would not guarantee that.
    Raises ValueError on NaN or values outside [0, 1].
    """
    if not bool(((confidence >= 0) & (confidence <= 1)).all()):
        raise ValueError("confidence must lie in [0, 1], without NaN")
    factors = confidence.float()
    result = torch.empty_like(factors)  # [..., gamma]
    running = torch.ones_like(factors[..., 0])
    for k in range(factors.shape[-1]):
        running = running * factors[..., k]
        result[..., k] = running
    return result
