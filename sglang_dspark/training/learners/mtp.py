"""Learner of MTP: see `chain`. The layer's output is read by the target's own head."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from sglang_dspark.baselines.mtp import MTPConfig, MTPDrafter, save_mtp
from sglang_dspark.training.config import MTPShape, ObjectiveConfig
from sglang_dspark.training.initial import target_weights
from sglang_dspark.training.learner import Ingredients, TargetHead
from sglang_dspark.training.learners.chain import ChainLosses, chain_shape, copy_matching
from sglang_dspark.training.losses import LossParts
from sglang_dspark.training.packing import PackedBatch

BRANCH = 0.3  # what attention and MLP add at the start, relative to what they are added to


class MTPLearner:
    """See `training.learner.Learner`."""

    def __init__(self, drafter: MTPDrafter, head: TargetHead, objective: ObjectiveConfig):
        """drafter: attached to its target. head: the target's, over its draft vocabulary."""
        self.module, self.gamma = drafter, drafter.config.gamma
        self.chain = ChainLosses(drafter, head, objective, head.logits)

    def losses(self, batch: PackedBatch) -> LossParts:
        """CE and TV over P * gamma positions."""
        return self.chain.losses(batch)

    def after_backward(self) -> None:
        """No weight is held."""

    def export(self, path: Path) -> None:
        """A checkpoint that SGLang serves as EAGLE."""
        save_mtp(self.module, path, torch.bfloat16)


@torch.no_grad()
def start_from_target(drafter: MTPDrafter, weights: dict[str, Tensor], last: int) -> None:
    """The target's layer `last`, made to work between its final norm and its head.

    The target's layer works on a normed input and adds to a residual stream of another size. Here
    it gets the sum of the normed hidden state and the embedding at the same size, without a norm,
    and what it adds is brought to BRANCH of that, measured on noise.
    """
    prefix, attention = f"model.layers.{last}.", drafter.self_attn
    copy_matching(drafter, weights, prefix)
    d = drafter.config.hidden_size
    gain = weights["model.norm.weight"]
    size = float(gain.pow(2).mean().sqrt())
    into = weights[prefix + "input_layernorm.weight"] / gain.clamp(min=1e-2)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.mul_(into.to(projection.weight.device))
    embedding = float(drafter.embed_weight.pow(2).mean().sqrt())
    eye = torch.eye(d, device=drafter.fc.weight.device)
    drafter.fc.weight.copy_(torch.cat([0.5 * size / embedding * eye, 0.5 * eye], 1))
    drafter.fc.bias.zero_()
    noise = torch.randn(256, d, generator=torch.Generator().manual_seed(0))
    x = (noise * gain).to(eye.device)
    groups = drafter.config.num_heads // drafter.config.num_kv_heads
    values = attention.v_proj(x).unflatten(-1, (-1, drafter.config.head_dim))
    mixed = values.repeat_interleave(groups, 1).flatten(1)
    _shrink(attention.o_proj, attention.o_proj(mixed), BRANCH * size)
    _shrink(drafter.mlp.down_proj, drafter.mlp(drafter.post_attention_layernorm(x)), BRANCH * size)


def _shrink(projection: nn.Linear, output: Tensor, size: float) -> None:
    """Scale the projection's weight so that this output of it has this root mean square at most."""
    projection.weight.mul_(min(size / float(output.pow(2).mean().sqrt()), 1.0))


def build(ingredients: Ingredients) -> MTPLearner:
    """An MTP drafter that starts from the target's last layer."""
    cfg, ids, target = ingredients.cfg, ingredients.vocabulary, ingredients.target
    shape = cfg.drafter
    assert isinstance(shape, MTPShape)
    drafter = MTPDrafter(MTPConfig(**chain_shape(shape, target, ids)), ids)
    drafter.to(ingredients.embed_weight.device)
    drafter.attach(ingredients.embed_weight, ingredients.head_weight)
    if ingredients.fresh and shape.init_from_target:
        last = target.num_hidden_layers - 1
        start_from_target(drafter, target_weights(cfg.data.target), last)
    head = TargetHead(ingredients.head_weight, ids, half=ingredients.half)
    return MTPLearner(drafter, head, cfg.objective)
