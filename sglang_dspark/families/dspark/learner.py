"""Train the DSpark drafter: backbone, sequential head, confidence head (paper, 3.1, 3.2.1).

It is teacher-forced over packed blocks (5.1) with the objective of 3.3.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.attention import PackedLayout
from sglang_dspark.drafter.checkpoint import save_drafter
from sglang_dspark.drafter.heads import OUTSIDE_VOCABULARY_BIAS, restrict_vocabulary
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.families.dspark.initial import drafter_config, initialise, start_from
from sglang_dspark.families.dspark.shape import DSparkShape, MoEShape
from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.learning.learner import Ingredients
from sglang_dspark.families.learning.losses import LossParts, dspark_loss, position_weights
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.learning.shards import local
from sglang_dspark.families.learning.target_head import TargetHead


class DSparkLearner:
    """See `families.learning.learner.Learner`.

    With a reduced draft vocabulary only its rows of W2 are trained and kept in memory. The
    reduction fixes the others, and `export` restores them.
    """

    def __init__(self, drafter: DSparkDrafter, head: TargetHead, objective: ObjectiveConfig):
        """Combine a drafter, attached to its target, and the target's head over its vocabulary."""
        self.module, self.gamma = drafter, drafter.config.gamma
        self.head, self.objective = head, objective
        if drafter.draft_ids is not None:
            rows = drafter.markov_head.markov_w2.weight.detach()[drafter.draft_ids]
            drafter.markov_head.markov_w2 = _linear(rows)

    def losses(self, batch: PackedBatch) -> LossParts:
        """Return three losses over P * gamma positions; see `dspark_loss`."""
        drafter = self.module
        layout = PackedLayout(batch.starts, batch.sequence, batch.positions)
        features = batch.features.to(self.head.weight.dtype)
        context = drafter.context_kv(features, batch.context_positions)
        h = drafter.forward_blocks(batch.anchors, batch.positions, context, layout)
        latent, embedded = self._sequential(batch.inputs, h)
        logits = self._logits(h.flatten(0, 1), latent.flatten(0, 1))
        has_confidence = drafter.confidence_head is not None
        confidence = drafter.confidence(h, embedded).flatten() if has_confidence else None
        with torch.no_grad():
            target = self.head.logits(batch.hidden.flatten(0, 1))
        weight = position_weights(self.gamma, self.objective.decay).to(h.device) * batch.valid
        return dspark_loss(
            logits,
            target,
            batch.log_partition.flatten(),
            self.head.columns(batch.labels).flatten(),
            confidence,
            weight.flatten(),
            self.objective,
        )

    def _logits(self, h: Tensor, latent: Tensor) -> Tensor:
        """Return U_k + B(x_{k-1}) over the draft vocabulary, [N, V'], added within the product."""
        dtype = self.head.weight.dtype
        bias = self.module.markov_head.bias(latent)
        return torch.addmm(bias.to(dtype), h.to(dtype), self.head.weight.t())

    def _sequential(self, inputs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return W2's inputs and embedded previous tokens, teacher-forced: [P, gamma, r] both."""
        head = self.module.markov_head
        embedded = head.embed(inputs)
        state, latents = head.start(len(inputs)), []
        for k in range(self.gamma):
            latent, state = head.latent(embedded[:, k], h[:, k], state)
            latents.append(latent)
        return torch.stack(latents, 1), embedded

    def after_backward(self) -> None:
        """Zero the gradient of the last rank, which encodes a reduced draft vocabulary."""
        if self.module.draft_ids is None:
            return
        head = self.module.markov_head
        for weight in (head.markov_w1.weight, head.markov_w2.weight):
            assert weight.grad is not None
            local(weight.grad)[:, -1] = 0

    def export(self, path: Path) -> None:
        """Write a checkpoint that SGLang serves as DSPARK."""
        head, ids = self.module.markov_head, self.module.draft_ids
        trained = head.markov_w2
        if ids is not None:
            rows = trained.weight.detach()
            full = rows.new_zeros(self.module.config.vocab_size, rows.shape[1])
            full[:, -1] = OUTSIDE_VOCABULARY_BIAS
            head.markov_w2 = _linear(full.index_copy(0, ids, rows))
        try:
            save_drafter(self.module, path, torch.bfloat16)
        finally:
            head.markov_w2 = trained


def _linear(weight: Tensor) -> nn.Linear:
    """Make a layer without bias that has this weight [out, in]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def build(ingredients: Ingredients) -> DSparkLearner:
    """Build the learner of a drafter that starts from another one or the target's last layers."""
    return DSparkLearner(*start(ingredients), ingredients.objective)


def start(ingredients: Ingredients) -> tuple[DSparkDrafter, TargetHead]:
    """Make a drafter (dense or experts), attached to its target, and the target's head."""
    ids = ingredients.vocabulary
    shape = ingredients.shape
    assert isinstance(shape, DSparkShape | MoEShape)
    drafter = DSparkDrafter(drafter_config(shape, ingredients.target))
    if ingredients.fresh and shape.start_from is not None:
        start_from(drafter, shape.start_from)
    elif ingredients.fresh and shape.init_from_target:
        here = None if ids is None else ids.cpu()  # the drafter is on the CPU until it is filled
        initialise(drafter, ingredients.target_dir, ingredients.pairs.cpu(), here)
    elif ids is not None:
        restrict_vocabulary(drafter.markov_head, ids.cpu())
    drafter.to(ingredients.embed_weight.device)
    drafter.attach(ingredients.embed_weight, ingredients.head_weight)
    return drafter, TargetHead(ingredients.head_weight, ids, half=ingredients.half)
