"""Low-precision formats of expert weights: quantise, pack, dequantise."""

from sglang_dspark.experts.formats import FORMATS, dequantise, quantise
from sglang_dspark.experts.layout import Quantised

__all__ = ["FORMATS", "Quantised", "dequantise", "quantise"]
