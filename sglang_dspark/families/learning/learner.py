"""Define `Learner`, which the trainer trains, and `Ingredients`, the inputs to build one.

A learner turns a packed batch into losses and its module into a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.learning.losses import LossParts
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.shape import BaseShape


class Learner(Protocol):
    """A drafter under training.

    module: its requires_grad parameters are trained and averaged; frozen tensors of the target are
    buffers, or plain attributes of the learner. gamma: positions of a block.
    """

    gamma: int

    @property
    def module(self) -> nn.Module:
        """Return the drafter."""
        ...

    def losses(self, batch: PackedBatch) -> LossParts:
        """Run the forward pass over a batch and return its losses.

        The trainer calls it under autocast if products are half precision; `LossParts.total` is a
        mean over `LossParts.weight`.
        """
        ...

    def after_backward(self) -> None:
        """Change the gradients before the update, e.g. zero those of fixed weights.

        Under FSDP they are sharded by rows: use `families.learning.shards.local(parameter.grad)`.
        """
        ...

    def export(self, path: Path) -> None:
        """Write the module as a checkpoint directory that engine and SGLang load."""
        ...


@dataclass(frozen=True)
class Ingredients:
    """Inputs of `Recipe.build`. Tensors are on the device that trains.

    shape: options of the kind, the config's `drafter`. objective: weights of the losses.
    target_dir: the target's checkpoint. target: its Transformers config. embed_weight, head_weight:
    [V, d] float32 of the target. vocabulary: ids [V'] int64, ascending, of the reduced draft
    vocabulary, or None. counts: [V] int64, occurrences of each token in the answers. pairs:
    [2, n] int64, their bigrams. half: products run in bfloat16 (the trainer's autocast). fresh:
    False if weights are loaded right after, so that initial ones need not be computed.
    """

    shape: BaseShape
    objective: ObjectiveConfig
    target_dir: Path
    target: Any
    embed_weight: Tensor
    head_weight: Tensor
    vocabulary: Tensor | None
    counts: Tensor
    pairs: Tensor
    half: bool
    fresh: bool
