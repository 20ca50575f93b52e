"""Scale rotary embeddings, which drafters inherit from their targets: `llama3` and `yarn`.

Frequencies are as Transformers computes them (modeling_rope_utils.py). llama3: slow planes rotate
slower by `factor`, fast ones are unchanged, those between are interpolated. yarn: the same with
another ramp, and queries and keys grow with `factor`.
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

LLAMA3, YARN = "llama3", "yarn"
SCALED = (LLAMA3, YARN)


@dataclass(frozen=True)
class Llama3Scaling:
    """Parameters of the scaling, named as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    magnitude = 1.0  # of rotated queries and keys

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Scale angles per position [planes]. theta: base of the frequencies."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: unchanged, 0: slower by factor
        return frequencies * (kept + (1 - kept) / self.factor)

    def to_json(self, theta: float) -> dict[str, Any]:
        """Return `rope_parameters` of config.json."""
        return {"rope_type": LLAMA3, "rope_theta": theta, **asdict(self)}


@dataclass(frozen=True)
class YarnScaling:
    """Parameters of the scaling, named as in config.json."""

    factor: float
    original_max_position_embeddings: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """Return the factor of rotated queries and keys."""
        return 0.1 * math.log(self.factor) + 1.0

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Scale angles per position [planes]. theta: base of the frequencies."""
        import torch

        planes = len(frequencies)
        ends = [self._plane(turns, planes, theta) for turns in (self.beta_fast, self.beta_slow)]
        if self.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], 2 * planes - 1)
        high += 0.001 if low == high else 0
        plane = torch.arange(planes, device=frequencies.device, dtype=torch.float32)
        slowed = ((plane - low) / (high - low)).clamp(0, 1)
        return frequencies * (1 - slowed + slowed / self.factor)

    def _plane(self, turns: float, planes: int, theta: float) -> float:
        """Return the fractional plane that rotates `turns` times within the original positions."""
        per_turn = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return planes * math.log(per_turn) / math.log(theta)

    def to_json(self, theta: float) -> dict[str, Any]:
        """Return `rope_parameters` of config.json."""
        return {"rope_type": YARN, "rope_theta": theta, **asdict(self)}


Scaling = Llama3Scaling | YarnScaling


def read_scaling(place: str, rotary: Mapping[str, Any]) -> Scaling | None:
    """Read the scaling of `rotary`, the field `place` of config.json; None for other types.

    Raises DSparkError that names the missing or impossible number.
    """
    kinds = (rotary.get("rope_type"), rotary.get("type"))
    if LLAMA3 in kinds:
        names = tuple(Llama3Scaling.__dataclass_fields__)
        scaling = Llama3Scaling(**{name: _number(place, rotary, name) for name in names})
        if scaling.factor < 1 or scaling.low_freq_factor >= scaling.high_freq_factor:
            needs = "a factor from 1 and low_freq_factor below high_freq_factor"
            raise _impossible(place, needs, asdict(scaling))
        return scaling
    return _yarn(place, rotary) if YARN in kinds else None


def _yarn(place: str, rotary: Mapping[str, Any]) -> YarnScaling:
    truncate = rotary.get("truncate", True)
    if type(truncate) is not bool:
        raise _impossible(place, "truncate true or false", truncate)
    scaling = YarnScaling(
        factor=_number(place, rotary, "factor"),
        original_max_position_embeddings=_number(place, rotary, "original_max_position_embeddings"),
        beta_fast=_number(place, rotary, "beta_fast", 32.0),
        beta_slow=_number(place, rotary, "beta_slow", 1.0),
        truncate=truncate,
    )
    if scaling.factor < 1 or scaling.beta_slow >= scaling.beta_fast:
        needs = "a factor from 1 and beta_slow below beta_fast"
        raise _impossible(place, needs, asdict(scaling))
    return scaling


def _number(
    place: str, rotary: Mapping[str, Any], name: str, default: float | None = None
) -> float:
    value = rotary.get(name)
    value = default if value is None else value
    try:
        return number(value, 1e-6, 1e9)
    except ValueError:
        raise DSparkError(
            f"{place}.{name} must be a number above 0, not {brief(repr(value), 40)}; write the "
            "value of the drafter's training"
        ) from None


def _impossible(place: str, needs: str, found: object) -> DSparkError:
    return DSparkError(
        f"{place} needs {needs}, not {brief(found, 120)}; write the values of its training"
    )
