"""BF16: the unquantised format; codes are the weights, there are no scales."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.quantisation.layout import Quantised, check_part, check_weights

NAME = "bf16"


def quantise(weight: Tensor) -> Quantised:
    """Round weights [..., N, K] to nearest even. Raises DSparkError for NaN or infinite ones."""
    check_weights(weight, NAME)
    return Quantised(NAME, tuple(weight.shape), weight.to(torch.bfloat16))


def dequantise(q: Quantised) -> Tensor:
    """Return float32 [..., N, K]. Raises DSparkError if the payload does not fit the shape."""
    return check_part(q.payload, q.shape, torch.bfloat16, "weights", NAME).float()
