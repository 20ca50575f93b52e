"""Low-precision formats of expert weights: quantise, pack, dequantise."""

from sglang_dspark.quantisation.formats import FORMATS, dequantise, quantise
from sglang_dspark.quantisation.layout import Quantised

__all__ = ["FORMATS", "Quantised", "dequantise", "quantise"]
