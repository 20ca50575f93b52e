"""Training options of DSpark drafters, dense ones and those with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from sglang_dspark.families.shape import BaseShape


class _WithHeads(BaseShape):
    """Options of drafters with a parallel backbone, a sequential and a confidence head
    (paper, 3.1, 3.2.1)."""

    layers: int = Field(3, ge=1, description="draft layers")
    markov_rank: int = Field(64, ge=1, description="rank of the transition bias")
    markov_head_type: Literal["vanilla", "gated", "rnn"] = Field(
        "vanilla", description="what the sequential head sees: the last token, or a state"
    )
    confidence_head: bool = Field(True, description="train one; the scheduler reads it")
    mask_token_id: int = Field(
        ge=0, description="token whose embedding is used at positions that are not known yet"
    )
    start_from: Path | None = Field(
        None, description="drafter directory of the same shape to go on from, e.g. with more data"
    )


class DSparkShape(_WithHeads):
    """Dense layers on the plain residual."""

    kind: Literal["dspark"] = Field("dspark", description="which drafter this is")


class MoEShape(_WithHeads):
    """Layers with experts, on several residual streams, over a window of the context."""

    kind: Literal["moe"] = Field(description="which drafter this is")
    experts: int = Field(8, ge=1, description="routed experts of a layer")
    experts_per_token: int = Field(2, ge=1, description="routed experts a token goes through")
    shared_experts: int = Field(1, ge=0, description="experts that every token goes through")
    expert_width: int | None = Field(
        None, ge=1, description="null: a token's experts are together as wide as the target's MLP"
    )
    router_scores: Literal["sigmoid", "softmax"] = Field(
        "sigmoid", description="how a router scores experts"
    )
    balance_rate: float = Field(1e-3, ge=0, description="step of the routers' biases; 0: none")
    residual_streams: int = Field(4, ge=1, description="mHC; 1: the plain residual")
    window: int | None = Field(128, ge=1, description="context tokens a block sees; null: all")
