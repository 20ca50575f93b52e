"""Train DFlash: the parallel backbone over packed blocks.

Each position is taught the target's distribution after the true tokens before it, which it does not
see (paper, 5.1; objective of 3.3 without the confidence term).

With a reduced vocabulary its softmax runs over that only, in training as in the engine; SGLang's
DFLASH has no reduced vocabulary and drafts over all tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.drafter.attention import PackedLayout
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.families.dflash.checkpoint import save_dflash
from sglang_dspark.families.dflash.model import DFlashConfig, DFlashDrafter
from sglang_dspark.families.dflash.shape import DFlashShape
from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.learning.initial import backbone_fields, start_backbone, target_weights
from sglang_dspark.families.learning.learner import Ingredients
from sglang_dspark.families.learning.losses import LossParts
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.learning.target_head import TargetHead, headless_losses


class DFlashLearner:
    """See `families.learning.learner.Learner`."""

    def __init__(self, drafter: DFlashDrafter, head: TargetHead, objective: ObjectiveConfig):
        """Combine a drafter, attached to its target, with the head over its draft vocabulary."""
        self.module, self.gamma = drafter, drafter.config.gamma
        self.head, self.objective = head, objective

    def logits(self, batch: PackedBatch) -> Tensor:
        """Return draft logits [P, gamma, V']."""
        drafter = self.module
        layout = PackedLayout(batch.starts, batch.sequence, batch.positions)
        features = batch.features.to(self.head.weight.dtype)
        context = drafter.context_kv(features, batch.context_positions)
        h = drafter.forward_blocks(batch.anchors, batch.positions, context, layout)
        return self.head.logits(h)

    def losses(self, batch: PackedBatch) -> LossParts:
        """Return CE and L_tv over P * gamma positions; see `headless_losses`."""
        return headless_losses(self.logits(batch), batch, self.head, self.objective)

    def after_backward(self) -> None:
        """Leave the gradients unchanged: no weight is fixed."""

    def export(self, path: Path) -> None:
        """Write a checkpoint that SGLang serves as DFLASH."""
        save_dflash(self.module, path, torch.bfloat16)


def shape_config(shape: DFlashShape, target: Any) -> DFlashConfig:
    """Return the drafter's config, with widths and heads of the target's (Transformers) config."""
    fields = backbone_fields(shape, shape.mask_token_id, target)
    return DFlashConfig(DrafterConfig(**fields, markov_rank=1, confidence_head=False))


def build(ingredients: Ingredients) -> DFlashLearner:
    """Build the learner of a DFlash drafter that starts from the target's last layers."""
    ids = ingredients.vocabulary
    shape = ingredients.shape
    assert isinstance(shape, DFlashShape)
    config = shape_config(shape, ingredients.target)
    drafter = DFlashDrafter(config, ids)
    if ingredients.fresh and shape.init_from_target:
        start_backbone(drafter.backbone, config.shape, target_weights(ingredients.target_dir))
    drafter.to(ingredients.embed_weight.device)
    drafter.attach(ingredients.embed_weight, ingredients.head_weight)
    head = TargetHead(ingredients.head_weight, ids, half=ingredients.half)
    return DFlashLearner(drafter, head, ingredients.objective)
