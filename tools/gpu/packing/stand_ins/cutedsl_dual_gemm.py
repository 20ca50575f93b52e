"""Replace SGLang's fused gate and up product, which is for Blackwell alone, by a stub.

Every CUDA server asks that module whether its kernel fits, and to import it takes CuTe DSL, 92 MB
of wheels. On a Hopper GPU the answer is no: it is given here, without them.
"""

from __future__ import annotations

from enum import IntEnum

MAX_DUAL_GEMM_DECODE_TOKENS = 16


class DualGemmQuantMode(IntEnum):
    """Quantisation of the activations behind the product."""

    STATIC_PER_TENSOR = 0
    STATIC_PER_TOKEN = 1
    DYNAMIC_PER_TENSOR = 2
    DYNAMIC_PER_TOKEN = 3
    UNQUANT = 4


def can_use_dual_gemm(
    num_tokens: int, hidden_size: int, intermediate_size: int, quant_mode: DualGemmQuantMode
) -> bool:
    """Never: the kernel is not here."""
    return False
