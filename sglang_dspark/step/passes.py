"""What one verify pass is asked for, and what came of it: handed from stage to stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sglang_dspark.step.rules import Rules


@dataclass(frozen=True)
class Pass:
    """A step's batch with its drafts, windows and layout; upstream's types where none is ours.

    came: the batch's `spec_info` before the pass, which puts another one there. drafted: whether
    any draft may be verified. foldable: a graph may accept in the pass. rules: what the device has
    to add to upstream's.
    """

    batch: Any
    came: Any
    window: Any  # positions and cache slots [R, gamma + 1]
    proposal: Any  # drafts [R, gamma]
    layout: Any
    ids: Tensor  # [R, gamma + 1] anchors and drafts
    drafted: bool
    foldable: bool
    rules: Rules

    @property
    def requests(self) -> int:
        """R."""
        return len(self.batch.seq_lens)


@dataclass(frozen=True)
class Verified:
    """outputs: upstream's, its logits [R * (gamma + 1), V] or [rows, V]. hidden: [rows, m * d].

    in_graph: a captured pass ran. folded: it accepted too. rows: where a device packs the rows of a
    pass, how they lie.
    """

    outputs: Any
    hidden: Tensor | None
    in_graph: bool = False
    folded: bool = False
    rows: Any = None
