"""Weights of the training losses."""

from __future__ import annotations

from pydantic import Field

from sglang_dspark.families.shape import FrozenModel


class ObjectiveConfig(FrozenModel):
    """Weights of the three losses (paper, eqs. 8-12), the paper's by default."""

    ce: float = Field(0.1, description="of the cross entropy")
    tv: float = Field(
        0.9,
        description="of L_tv = sum_v |p_t - p_d| (eq. 10): 0.45 is 0.9 times the total variation",
    )
    confidence: float = Field(1.0, description="of the confidence head's loss")
    soft_labels: bool = Field(
        False,
        description="cross entropy with the target's distribution, as Eagle3 is trained; false: "
        "with its token",
    )
    decay: float | None = Field(
        None, gt=0, description="position k weighs exp(-(k - 1) / decay); null: gamma"
    )
