"""The formats of expert weights, by name: `bf16`, `fp8` (DeepSeek's 128 x 128 blocks), `mxfp4`
(OCP) and `nvfp4` (NVIDIA); one module each. All round to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from sglang_dspark.errors import DSparkError
from sglang_dspark.quantisation import bf16, fp8, mxfp4, nvfp4
from sglang_dspark.quantisation.layout import Quantised


@dataclass(frozen=True)
class ExpertFormat:
    """A format: its quantiser and dequantiser, and the bits per weight, scales included."""

    name: str
    quantise: Callable[[Tensor], Quantised]
    dequantise: Callable[[Quantised], Tensor]
    bits_per_weight: float


FORMATS: Mapping[str, ExpertFormat] = {
    f.name: f
    for f in (
        ExpertFormat(bf16.NAME, bf16.quantise, bf16.dequantise, 16),
        ExpertFormat(fp8.NAME, fp8.quantise, fp8.dequantise, 8 + 32 / fp8.BLOCK**2),
        ExpertFormat(mxfp4.NAME, mxfp4.quantise, mxfp4.dequantise, 4 + 8 / mxfp4.BLOCK),
        ExpertFormat(nvfp4.NAME, nvfp4.quantise, nvfp4.dequantise, 4 + 8 / nvfp4.BLOCK),
    )
}


def expert_format(name: str) -> ExpertFormat:
    """Find a format by name. Raises DSparkError if it is unknown."""
    if name not in FORMATS:
        raise DSparkError(f"expert format {name!r} is none of {', '.join(FORMATS)}")
    return FORMATS[name]


def quantise(weight: Tensor, name: str) -> Quantised:
    """Quantise weights [..., N, K] (out, in; any float dtype) to the format `name`.

    Weights without elements give codes and scales without elements. Raises DSparkError for an
    unknown format, NaN or infinite weights, and K that is no multiple of a 4-bit format's block.
    """
    return expert_format(name).quantise(weight)


def dequantise(quantised: Quantised) -> Tensor:
    """Restore the weights, float32 [..., N, K], from codes and scales.

    Raises DSparkError for an unknown format and for codes or scales whose shape or dtype does not
    fit the weights' shape.
    """
    return expert_format(quantised.format).dequantise(quantised)
