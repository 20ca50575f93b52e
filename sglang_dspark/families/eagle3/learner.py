"""Train Eagle3, see `chain`.

Its head over the draft vocabulary starts as the target's rows; `train_head` sets whether it is
trained.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.families.chain.learner import ChainLosses, chain_shape, copy_matching
from sglang_dspark.families.eagle3.checkpoint import save_eagle3
from sglang_dspark.families.eagle3.model import Eagle3Config, Eagle3Drafter
from sglang_dspark.families.eagle3.shape import Eagle3Shape
from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.learning.initial import start_projection, target_weights
from sglang_dspark.families.learning.learner import Ingredients
from sglang_dspark.families.learning.losses import LossParts
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.learning.target_head import TargetHead


class Eagle3Learner:
    """See `families.learning.learner.Learner`."""

    def __init__(self, drafter: Eagle3Drafter, head: TargetHead, objective: ObjectiveConfig):
        """Combine a drafter, attached to its target, and the target's head over its vocabulary."""
        self.module, self.gamma = drafter, drafter.config.gamma
        self.chain = ChainLosses(drafter, head, objective, drafter.logits)

    def losses(self, batch: PackedBatch) -> LossParts:
        """Return CE and L_tv over P * gamma positions."""
        return self.chain.losses(batch)

    def after_backward(self) -> None:
        """Leave the gradients unchanged: no weight is fixed."""

    def export(self, path: Path) -> None:
        """Write a checkpoint that SGLang serves as EAGLE3."""
        save_eagle3(self.module, path, torch.bfloat16)


@torch.no_grad()
def start_from_target(drafter: Eagle3Drafter, weights: dict[str, Tensor], last: int) -> None:
    """Copy the target's layer `last`, for the token as for the features, and its final norm."""
    prefix, d = f"model.layers.{last}.", drafter.config.hidden_size
    copy_matching(drafter, weights, prefix)
    drafter.hidden_norm.weight.copy_(weights[prefix + "input_layernorm.weight"])
    drafter.norm.weight.copy_(weights["model.norm.weight"])
    for kind in ("q", "k", "v"):
        source = weights[f"{prefix}self_attn.{kind}_proj.weight"]
        wide = getattr(drafter.self_attn, f"{kind}_proj").weight  # [out, 2d]: token, features
        wide[:, :d].copy_(source)
        wide[:, d:].copy_(source)
    start_projection(drafter.fc.weight, d)


def build(ingredients: Ingredients) -> Eagle3Learner:
    """Build an Eagle3 drafter that starts from the target's last layer, or from random weights."""
    ids, target = ingredients.vocabulary, ingredients.target
    shape = ingredients.shape
    assert isinstance(shape, Eagle3Shape)
    fields = chain_shape(shape, target, ids)
    config = Eagle3Config(**fields, target_layer_ids=tuple(shape.target_layer_ids))
    drafter = Eagle3Drafter(config, ids)
    drafter.to(ingredients.embed_weight.device)
    drafter.lm_head.requires_grad_(shape.train_head)
    if ingredients.fresh or not shape.train_head:  # a run's state holds trained weights only
        drafter.start_head(ingredients.head_weight)
    if ingredients.fresh and shape.init_from_target:
        last = target.num_hidden_layers - 1
        start_from_target(drafter, target_weights(ingredients.target_dir), last)
    drafter.attach(ingredients.embed_weight, ingredients.head_weight)
    head = TargetHead(ingredients.head_weight, ids, half=ingredients.half)
    return Eagle3Learner(drafter, head, ingredients.objective)
