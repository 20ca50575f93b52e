"""Learner of DFlash: the parallel backbone over packed blocks, each position taught the target's
law after the true tokens before it, which it does not see (paper, 5.1; objective of 3.3 without the
confidence term).

With a reduced vocabulary its softmax runs over that alone, in training as in the engine; SGLang's
DFLASH has no reduced vocabulary and drafts over all tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.baselines.dflash import DFlashConfig, DFlashDrafter, save_dflash
from sglang_dspark.drafter.attention import PackedLayout
from sglang_dspark.training.config import DFlashShape, ObjectiveConfig
from sglang_dspark.training.initial import drafter_config, start_backbone, target_weights
from sglang_dspark.training.learner import Ingredients, TargetHead
from sglang_dspark.training.losses import LossParts, dspark_loss, position_weights
from sglang_dspark.training.packing import PackedBatch


class DFlashLearner:
    """See `training.learner.Learner`."""

    def __init__(self, drafter: DFlashDrafter, head: TargetHead, objective: ObjectiveConfig):
        """drafter: attached to its target. head: over its draft vocabulary."""
        self.module, self.gamma = drafter, drafter.config.gamma
        self.head, self.objective = head, objective

    def logits(self, batch: PackedBatch) -> Tensor:
        """Draft logits [P, gamma, V']."""
        drafter = self.module
        layout = PackedLayout(batch.starts, batch.sequence, batch.positions)
        features = batch.features.to(self.head.weight.dtype)
        context = drafter.context_kv(features, batch.context_positions)
        h = drafter.forward_blocks(batch.anchors, batch.positions, context, layout)
        return self.head.logits(h)

    def losses(self, batch: PackedBatch) -> LossParts:
        """CE and L_tv over P * gamma positions; see `headless_losses`."""
        return headless_losses(self.logits(batch), batch, self.head, self.objective)

    def after_backward(self) -> None:
        """No weight is held."""

    def export(self, path: Path) -> None:
        """A checkpoint that SGLang serves as DFLASH."""
        save_dflash(self.module, path, torch.bfloat16)


def headless_losses(
    logits: Tensor, batch: PackedBatch, head: TargetHead, objective: ObjectiveConfig
) -> LossParts:
    """The objective for drafters without a confidence head: logits [P, gamma, V'] over the draft
    vocabulary of `head`, against the target's law at every position."""
    with torch.no_grad():
        target = head.logits(batch.hidden)
    weight = position_weights(batch.gamma).to(logits.device) * batch.valid
    return dspark_loss(
        logits.flatten(0, 1),
        target.flatten(0, 1),
        batch.log_partition.flatten(),
        head.columns(batch.labels).flatten(),
        None,
        weight.flatten(),
        objective,
    )


def build(ingredients: Ingredients) -> DFlashLearner:
    """A DFlash drafter that starts from the target's last layers."""
    cfg, ids = ingredients.cfg, ingredients.vocabulary
    shape = cfg.drafter
    assert isinstance(shape, DFlashShape)
    config = DFlashConfig(drafter_config(shape, ingredients.target))
    drafter = DFlashDrafter(config, ids)
    if ingredients.fresh and shape.init_from_target:
        start_backbone(drafter.backbone, config.shape, target_weights(cfg.data.target))
    drafter.to(ingredients.embed_weight.device)
    drafter.attach(ingredients.embed_weight, ingredients.head_weight)
    head = TargetHead(ingredients.head_weight, ids, half=ingredients.half)
    return DFlashLearner(drafter, head, cfg.objective)
