"""Train MTP, see `chain`. The target's own head reads the layer's output."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.errors import DSparkError
from sglang_dspark.families.chain.learner import ChainLosses, chain_shape
from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.learning.initial import target_weights
from sglang_dspark.families.learning.learner import Ingredients
from sglang_dspark.families.learning.losses import LossParts
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.learning.target_head import TargetHead
from sglang_dspark.families.mtp.checkpoint import load_mtp, save_mtp
from sglang_dspark.families.mtp.model import MTPConfig, MTPDrafter
from sglang_dspark.families.mtp.shape import MTPShape

START = 0.3  # root mean square of the projection's output when training starts


class MTPLearner:
    """See `families.learning.learner.Learner`."""

    def __init__(self, drafter: MTPDrafter, head: TargetHead, objective: ObjectiveConfig):
        """Combine a drafter, attached to its target, and the target's head over its vocabulary."""
        self.module, self.gamma = drafter, drafter.config.gamma
        self.chain = ChainLosses(drafter, head, objective, head.logits)

    def losses(self, batch: PackedBatch) -> LossParts:
        """Return CE and L_tv over P * gamma positions."""
        return self.chain.losses(batch)

    def after_backward(self) -> None:
        """Leave the gradients unchanged: no weight is fixed."""

    def export(self, path: Path) -> None:
        """Write a checkpoint that SGLang serves as EAGLE."""
        save_mtp(self.module, path, torch.bfloat16)


@torch.no_grad()
def start_projection(drafter: MTPDrafter, gain: Tensor) -> None:
    """Fill a small random projection that weighs embedding and hidden state equally.

    gain [d]: weight of the target's final norm, the size of its hidden states. The target's last
    layer is not copied: without an input norm and a final norm, its weights get inputs of another
    size, and gradients explode in the first steps.
    """
    d = drafter.config.hidden_size
    sizes = (drafter.embed_weight.pow(2).mean().sqrt(), gain.pow(2).mean().sqrt())
    for part, size in zip(drafter.fc.weight.split(d, 1), sizes, strict=True):
        part.normal_(std=START / (2 * d) ** 0.5 / float(size))
    drafter.fc.bias.zero_()


def start_from(drafter: MTPDrafter, path: Path) -> None:
    """Copy the weights of a drafter of the same shape. Raises DSparkError if the shapes differ."""
    found = load_mtp(path, drafter.embed_weight, drafter.embed_weight)
    if found.config != drafter.config:
        raise DSparkError(
            f"drafter.start_from {path} has another shape: {found.config}, not {drafter.config}"
        )
    drafter.load_state_dict(found.state_dict())


def build(ingredients: Ingredients) -> MTPLearner:
    """Build the learner of an MTP drafter.

    The drafter starts from another one or from random weights, its projection fitted to the
    target's sizes.
    """
    ids, target = ingredients.vocabulary, ingredients.target
    shape = ingredients.shape
    assert isinstance(shape, MTPShape)
    drafter = MTPDrafter(MTPConfig(**chain_shape(shape, target, ids)), ids)
    drafter.to(ingredients.embed_weight.device)
    drafter.attach(ingredients.embed_weight, ingredients.head_weight)
    if ingredients.fresh and shape.start_from is not None:
        start_from(drafter, shape.start_from)
    elif ingredients.fresh and shape.init_from_target:
        start_projection(drafter, target_weights(ingredients.target_dir)["model.norm.weight"])
    head = TargetHead(ingredients.head_weight, ids, half=ingredients.half)
    return MTPLearner(drafter, head, ingredients.objective)
