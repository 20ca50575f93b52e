"""Options of `drafter` in a training config that all families have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field


class FrozenModel(BaseModel):
    """A part of a training config: read-only, unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BaseShape(FrozenModel):
    """Options of every family; widths and heads follow from the target's config.

    A subclass adds `kind: Literal[NAME]`, the value that selects it.
    """

    if TYPE_CHECKING:  # each subclass declares it after its own options
        kind: str

    gamma: int = Field(5, ge=1, description="drafts of a step")
    layers: int = Field(1, ge=1, description="draft layers")
    target_layer_ids: tuple[int, ...] = Field(
        min_length=1, description="target layers whose outputs the draft reads, from 0"
    )
    draft_vocab: int | None = Field(
        8192, ge=1, description="tokens the draft can propose; null: all"
    )
    init_from_target: bool = Field(
        True, description="begin with weights of the target's layers; false: random ones"
    )
