"""Compute the losses that the learners of Eagle3 and MTP share.

The layer is unrolled for gamma steps over its own outputs, with the true tokens as inputs (Eagle3's
training-time test with horizon gamma; paper, 5.1; objective of 3.3 without the confidence term).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.drafter.attention import PackedLayout, packed_attention
from sglang_dspark.families.chain.model import Attend, ChainDrafter
from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.learning.losses import LossParts
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.learning.target_head import TargetHead, headless_losses
from sglang_dspark.families.shape import BaseShape


class ChainLosses:
    """Forward pass and losses of a one-layer drafter over packed blocks."""

    def __init__(
        self,
        drafter: ChainDrafter,
        head: TargetHead,
        objective: ObjectiveConfig,
        read: Callable[[Tensor], Tensor],
    ):
        """Combine a drafter, attached to its target, with the head over its draft vocabulary.

        read: the layer's output [..., d] -> draft logits [..., V'].
        """
        self.drafter, self.head, self.objective, self.read = drafter, head, objective, read

    def logits(self, batch: PackedBatch) -> Tensor:
        """Return draft logits [P, gamma, V']."""
        drafter = self.drafter
        states = batch.features if drafter.reads_features else batch.last_hidden
        states = states.to(self.head.weight.dtype)
        before = states[batch.starts[batch.sequence] + batch.positions - 1]  # [P, w]
        attend = self._attend(batch, states)
        steps = drafter.unroll(
            before, batch.positions - 1, lambda k: batch.inputs[:, k - 1], attend
        )
        return self.read(torch.stack(list(islice(steps, batch.gamma)), 1))

    def losses(self, batch: PackedBatch) -> LossParts:
        """Return CE and L_tv over P * gamma positions."""
        return headless_losses(self.logits(batch), batch, self.head, self.objective)

    def _attend(self, batch: PackedBatch, states: Tensor) -> Attend:
        """Return the attention of packed blocks over their contexts and own entries.

        Context entries are (token at j, state at j - 1), j >= 1, of every sequence. A block whose
        anchor is at p sees those with j < p.
        """
        at = (batch.context_positions > 0).nonzero()[:, 0]
        positions = batch.context_positions[at] - 1
        context = self.drafter.context_kv(batch.tokens[at], states[at - 1], positions)
        sequences = torch.arange(len(batch.starts), device=at.device)
        layout = PackedLayout(batch.starts - sequences, batch.sequence, batch.positions - 1)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return packed_attention(query, keys, values, context, layout)

        return attend


def chain_shape(shape: BaseShape, target: Any, ids: Tensor | None) -> dict[str, Any]:
    """Return `ChainConfig`'s fields, with widths and heads of the (Transformers) target config."""
    rope = getattr(target, "rope_parameters", None) or {}
    heads = target.num_attention_heads
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": target.num_key_value_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "vocab_size": target.vocab_size,
        "gamma": shape.gamma,
        "draft_vocab_size": target.vocab_size if ids is None else len(ids),
        "rms_norm_eps": 1e-6,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "max_position_embeddings": target.max_position_embeddings,
    }


@torch.no_grad()
def copy_matching(drafter: ChainDrafter, weights: dict[str, Tensor], prefix: str) -> None:
    """Copy the parameters that a target layer (names begin with `prefix`) has in the same shape."""
    for name, parameter in drafter.named_parameters():
        source = weights.get(prefix + name)
        if source is not None and source.shape == parameter.shape:
            parameter.copy_(source)
