"""Learner of the DSpark drafter: parallel backbone, sequential head, confidence head (paper, 3.1,
3.2.1), teacher-forced over packed blocks (5.1) with the objective of 3.3.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.drafter.attention import PackedLayout
from sglang_dspark.drafter.checkpoint import save_drafter
from sglang_dspark.drafter.heads import restrict_vocabulary
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.training.config import DSparkShape, ObjectiveConfig
from sglang_dspark.training.distributed import local
from sglang_dspark.training.initial import drafter_config, initialise
from sglang_dspark.training.learner import Ingredients, TargetHead
from sglang_dspark.training.losses import LossParts, dspark_loss, position_weights
from sglang_dspark.training.packing import PackedBatch


class DSparkLearner:
    """See `training.learner.Learner`."""

    def __init__(
        self,
        drafter: DSparkDrafter,
        head: TargetHead,
        objective: ObjectiveConfig,
        *,
        draft_ids: Tensor | None = None,
    ):
        """drafter: attached to its target. head: over its draft vocabulary `draft_ids` [V']."""
        self.module, self.gamma = drafter, drafter.config.gamma
        self.head, self.objective, self.draft_ids = head, objective, draft_ids

    def losses(self, batch: PackedBatch) -> LossParts:
        """Three losses over P * gamma positions; see `dspark_loss`."""
        drafter = self.module
        layout = PackedLayout(batch.starts, batch.sequence, batch.positions)
        features = batch.features.to(self.head.weight.dtype)
        context = drafter.context_kv(features, batch.context_positions)
        h = drafter.forward_blocks(batch.anchors, batch.positions, context, layout)
        latent, embedded = self._sequential(batch.inputs, h)
        logits = self.head.logits(h) + drafter.markov_head.bias(latent, self.draft_ids)
        has_confidence = drafter.confidence_head is not None
        confidence = drafter.confidence(h, embedded).flatten() if has_confidence else None
        with torch.no_grad():
            target = self.head.logits(batch.hidden)
        weight = position_weights(self.gamma).to(h.device) * batch.valid
        return dspark_loss(
            logits.flatten(0, 1),
            target.flatten(0, 1),
            batch.log_partition.flatten(),
            self.head.columns(batch.labels).flatten(),
            confidence,
            weight.flatten(),
            self.objective,
        )

    def _sequential(self, inputs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of W2 and the embedded previous tokens, teacher-forced: [P, gamma, r] both."""
        head = self.module.markov_head
        embedded = head.embed(inputs)
        state, latents = head.start(len(inputs)), []
        for k in range(self.gamma):
            latent, state = head.latent(embedded[:, k], h[:, k], state)
            latents.append(latent)
        return torch.stack(latents, 1), embedded

    def after_backward(self) -> None:
        """The last rank encodes a reduced draft vocabulary and is not trained."""
        if self.module.draft_ids is None:
            return
        head = self.module.markov_head
        for weight in (head.markov_w1.weight, head.markov_w2.weight):
            assert weight.grad is not None
            local(weight.grad)[:, -1] = 0

    def export(self, path: Path) -> None:
        """A checkpoint that SGLang serves as DSPARK."""
        save_drafter(self.module, path, torch.bfloat16)


def build(ingredients: Ingredients) -> DSparkLearner:
    """A DSpark drafter that starts from the target's last layers."""
    cfg, ids = ingredients.cfg, ingredients.vocabulary
    shape = cfg.drafter
    assert isinstance(shape, DSparkShape)
    drafter = DSparkDrafter(drafter_config(shape, ingredients.target))
    if ingredients.fresh and shape.init_from_target:
        initialise(drafter, cfg.data.target, ingredients.pairs.cpu(), ids)
    elif ids is not None:
        restrict_vocabulary(drafter.markov_head, ids.cpu())
    drafter.to(ingredients.embed_weight.device)
    drafter.attach(ingredients.embed_weight, ingredients.head_weight)
    head = TargetHead(ingredients.head_weight, ids, half=ingredients.half)
    return DSparkLearner(drafter, head, cfg.objective, draft_ids=ids)
