"""Training options of MTP drafters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sglang_dspark.families.shape import BaseShape


class MTPShape(BaseShape):
    """One layer chained over its own hidden state, as DeepSeek's multi-token prediction."""

    kind: Literal["mtp"] = Field(description="which drafter this is")
