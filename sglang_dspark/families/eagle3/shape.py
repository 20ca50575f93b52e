"""Training options of Eagle3 drafters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sglang_dspark.families.shape import BaseShape


class Eagle3Shape(BaseShape):
    """One autoregressive layer over fused features, trained with its own outputs as inputs."""

    train_head: bool = Field(
        True, description="train the LM head of the draft too; false: it stays the target's"
    )
    kind: Literal["eagle3"] = Field(description="which drafter this is")
