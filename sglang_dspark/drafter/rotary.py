"""Rotary embeddings of `rope_type: llama3`, which drafters of Llama 3 targets take over from them.

Frequencies are as Transformers computes them (modeling_rope_utils.py): slow planes turn slower by
`factor`, quick ones as they are, those between are interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sglang_dspark.common.files import brief, number
from sglang_dspark.errors import DSparkError

if TYPE_CHECKING:
    from torch import Tensor

LLAMA3 = "llama3"


@dataclass(frozen=True)
class Llama3Scaling:
    """Parameters of the scaling, named as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def scale(self, frequencies: Tensor) -> Tensor:
        """Scale angles per position [planes]."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: as it is, 0: slower by factor
        return frequencies * (kept + (1 - kept) / self.factor)

    def to_json(self, theta: float) -> dict[str, Any]:
        """Return `rope_parameters` of config.json."""
        return {"rope_type": LLAMA3, "rope_theta": theta, **asdict(self)}


def read_llama3(place: str, rotary: Mapping[str, Any]) -> Llama3Scaling | None:
    """Read the scaling of `rotary`, the field `place` of config.json; None: of another type.

    Raises DSparkError naming the number that is missing or impossible.
    """
    if LLAMA3 not in (rotary.get("rope_type"), rotary.get("type")):
        return None
    values = {}
    for name in Llama3Scaling.__dataclass_fields__:
        try:
            values[name] = number(rotary.get(name), 1e-6, 1e9)
        except ValueError:
            raise DSparkError(
                f"{place}.{name} must be a number above 0, not "
                f"{brief(repr(rotary.get(name)), 40)}; write the value of the drafter's training"
            ) from None
    scaling = Llama3Scaling(**values)
    if scaling.factor < 1 or scaling.low_freq_factor >= scaling.high_freq_factor:
        raise DSparkError(
            f"{place} needs a factor from 1 and low_freq_factor below high_freq_factor, not "
            f"{brief(values, 120)}; write the values of the drafter's training"
        )
    return scaling
