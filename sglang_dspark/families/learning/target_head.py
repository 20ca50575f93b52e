"""The target's LM head over the draft vocabulary, and the losses of drafters without confidence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.learning.losses import LossParts, dspark_loss, position_weights
from sglang_dspark.families.learning.objective import ObjectiveConfig


class TargetHead:
    """The target's LM head over the draft vocabulary, kept in the dtype its products run in."""

    def __init__(self, head_weight: Tensor, vocabulary: Tensor | None, *, half: bool):
        """Select the draft vocabulary's rows of head_weight [V, d].

        vocabulary: ids [V'], or None for all. half: products in bfloat16.
        """
        rows = head_weight if vocabulary is None else head_weight[vocabulary]
        self.weight = rows.bfloat16() if half else rows  # [V', d]
        size = len(head_weight)
        if vocabulary is None:
            self._column = torch.arange(size, device=rows.device)
        else:
            self._column = torch.full((size,), -1, device=rows.device)
            self._column[vocabulary] = torch.arange(len(vocabulary), device=rows.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [..., d] to logits [..., V'] in the products' dtype, differentiably."""
        return nn.functional.linear(hidden.to(self.weight.dtype), self.weight)

    def columns(self, tokens: Tensor) -> Tensor:
        """Map token ids to columns of the logits, -1 outside the draft vocabulary."""
        return self._column[tokens]


def headless_losses(
    logits: Tensor, batch: PackedBatch, head: TargetHead, objective: ObjectiveConfig
) -> LossParts:
    """Compute the objective of drafters without a confidence head.

    logits [P, gamma, V'] over the draft vocabulary of `head`, against the target's distribution at
    every position.
    """
    with torch.no_grad():
        target = head.logits(batch.hidden)
    weight = position_weights(batch.gamma, objective.decay).to(logits.device) * batch.valid
    return dspark_loss(
        logits.flatten(0, 1),
        target.flatten(0, 1),
        batch.log_partition.flatten(),
        head.columns(batch.labels).flatten(),
        None,
        weight.flatten(),
        objective,
    )
