"""What the trainer knows of a drafter: a `Learner` turns a packed batch into losses and its module
into a checkpoint. One factory per kind (`drafter.kind` in the config), in `training/learners/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sglang_dspark.errors import DSparkError
from sglang_dspark.training.config import RunConfig
from sglang_dspark.training.losses import LossParts
from sglang_dspark.training.packing import PackedBatch


class Learner(Protocol):
    """A drafter under training.

    module: its requires_grad parameters are trained and averaged; frozen tensors of the target are
    buffers, or plain attributes of the learner. gamma: positions of a block.
    """

    module: nn.Module
    gamma: int

    def losses(self, batch: PackedBatch) -> LossParts:
        """Forward pass over a batch. The trainer calls it under autocast where products are half
        precision; `LossParts.total` is a mean over `LossParts.weight`."""
        ...

    def after_backward(self) -> None:
        """Last change to the gradients, e.g. none for weights that are held. Under FSDP they are
        sharded by rows: work on `training.distributed.local(parameter.grad)`."""
        ...

    def export(self, path: Path) -> None:
        """Write the module as a checkpoint directory that engine and SGLang load."""
        ...


@dataclass(frozen=True)
class Ingredients:
    """What a factory builds a learner from. Tensors are on the device that trains.

    cfg: the run's config, `cfg.drafter` has the options of the kind. target: the target's
    Transformers config. embed_weight, head_weight: [V, d] float32 of the target. vocabulary: ids
    [V'] int64, ascending, of the reduced draft vocabulary, or None. counts: [V] int64, how often
    each token occurs in the answers. pairs: [2, n] int64, their bigrams. half: products run in
    bfloat16 (the trainer's autocast). fresh: False when weights are loaded right after, so that
    computing initial ones is for nothing.
    """

    cfg: RunConfig
    target: Any
    embed_weight: Tensor
    head_weight: Tensor
    vocabulary: Tensor | None
    counts: Tensor
    pairs: Tensor
    half: bool
    fresh: bool


class TargetHead:
    """The target's LM head over the draft vocabulary, kept in the dtype its products run in."""

    def __init__(self, head_weight: Tensor, vocabulary: Tensor | None, *, half: bool):
        """head_weight [V, d]; vocabulary ids [V'] or None for all; half: products in bfloat16."""
        rows = head_weight if vocabulary is None else head_weight[vocabulary]
        self.weight = rows.bfloat16() if half else rows  # [V', d]
        size = len(head_weight)
        if vocabulary is None:
            self._column = torch.arange(size, device=rows.device)
        else:
            self._column = torch.full((size,), -1, device=rows.device)
            self._column[vocabulary] = torch.arange(len(vocabulary), device=rows.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] -> logits [..., V'] in the products' dtype; differentiable in hidden."""
        return nn.functional.linear(hidden.to(self.weight.dtype), self.weight)

    def columns(self, tokens: Tensor) -> Tensor:
        """Token ids -> columns of the logits, -1 outside the draft vocabulary."""
        return self._column[tokens]


Factory = Callable[[Ingredients], Learner]


def _factory(kind: str) -> Factory:
    """`build` of the kind's module, imported when it is asked for."""

    def build(ingredients: Ingredients) -> Learner:
        return import_module(f"sglang_dspark.training.learners.{kind}").build(ingredients)

    return build


LEARNERS: dict[str, Factory] = {
    k: _factory(k) for k in ("dspark", "moe", "dflash", "eagle3", "mtp")
}


def build_learner(ingredients: Ingredients) -> Learner:
    """The learner that the config asks for; DSparkError for an unknown kind."""
    kind = ingredients.cfg.drafter.kind
    if kind not in LEARNERS:
        raise DSparkError(f"drafter.kind {kind!r} is none of {', '.join(LEARNERS)}")
    return LEARNERS[kind](ingredients)
