"""Training options of DFlash drafters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sglang_dspark.families.shape import BaseShape


class DFlashShape(BaseShape):
    """Parallel backbone alone: block diffusion without a sequential head."""

    kind: Literal["dflash"] = Field(description="which drafter this is")
    layers: int = Field(5, ge=1, description="draft layers")
    mask_token_id: int = Field(
        ge=0, description="token whose embedding is used at positions that are not known yet"
    )
