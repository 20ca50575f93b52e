"""Training options of MTP drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from sglang_dspark.families.shape import BaseShape


class MTPShape(BaseShape):
    """One layer chained over its own hidden state, as DeepSeek's multi-token prediction."""

    start_from: Path | None = Field(
        None, description="drafter directory of the same shape to go on from, e.g. with more data"
    )
    kind: Literal["mtp"] = Field(description="which drafter this is")
