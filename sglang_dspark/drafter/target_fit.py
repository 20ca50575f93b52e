"""Compare a drafter's config.json with the target that it is to draft for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sglang_dspark.drafter.fields import Fields
from sglang_dspark.errors import DSparkError


@dataclass(frozen=True)
class Target:
    """A target's sizes. path: for messages. num_layers: None if unknown."""

    path: str
    hidden_size: int
    vocab_size: int
    num_layers: int | None
    architecture: str = ""


def target_with(embed_tokens: Tensor, num_layers: int | None = None) -> Target:
    """Describe the target that a command has opened, with an embedding [V, d]."""
    vocab_size, hidden_size = embed_tokens.shape
    return Target("of this command", hidden_size, vocab_size, num_layers)


def require_sizes(path: Path, hidden_size: int, vocab_size: int, target: Target) -> None:
    """Raise DSparkError unless hidden size and vocabulary are the target's: both are shared."""
    for name, ours, theirs in (
        ("hidden_size", hidden_size, target.hidden_size),
        ("vocab_size", vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise DSparkError(
                f"drafter {path}: {name} is {ours}, but the target {target.path} has {theirs}; "
                "use a drafter trained for this target"
            )


def require_depth(path: Path, raw: Mapping[str, Any], target: Target) -> None:
    """Raise DSparkError unless the target is as deep as config.json says and has its layers.

    raw: config.json, which need not name `num_target_layers`.
    """
    if target.num_layers is None:
        return
    fields = Fields(raw, path)
    trained = fields.get("num_target_layers")
    if trained not in (None, target.num_layers):
        raise DSparkError(
            f"drafter {path}: num_target_layers is {trained}, but the target {target.path} has "
            f"{target.num_layers} layers; use a drafter trained for this target"
        )
    outside = [i for i in fields.layer_ids() if not 0 <= i < target.num_layers]
    if outside:
        raise DSparkError(
            f"drafter {path}: target_layer_ids {outside} lie outside the target's layers 0.."
            f"{target.num_layers - 1}; use a drafter trained for this target"
        )
