"""Replace SGLang's fused gate and up product, which is only for Blackwell, by a stub.

Every CUDA server calls that module to check whether its kernel can be used, and its import requires
CuTe DSL, 92 MB of wheels. On a Hopper GPU the result is False: the stub returns it without them.
"""

from __future__ import annotations

from enum import IntEnum

MAX_DUAL_GEMM_DECODE_TOKENS = 16


class DualGemmQuantMode(IntEnum):
    """Quantisation of the activations after the product."""

    STATIC_PER_TENSOR = 0
    STATIC_PER_TOKEN = 1
    DYNAMIC_PER_TENSOR = 2
    DYNAMIC_PER_TOKEN = 3
    UNQUANT = 4


def can_use_dual_gemm(
    num_tokens: int, hidden_size: int, intermediate_size: int, quant_mode: DualGemmQuantMode
) -> bool:
    """Return False: the kernel was not sent."""
    return False
