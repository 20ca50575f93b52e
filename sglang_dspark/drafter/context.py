"""Store the context of the parallel drafters, in slots of requests.

The context is the target's features as keys and values of every draft layer (paper, 3.1.1).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sglang_dspark.drafter.attention import ContextKV
from sglang_dspark.drafter.backbone import Backbone
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.errors import DSparkError


class FeatureContext:
    """Keys and values [slots, max_len, Hkv, D] of each draft layer."""

    def __init__(self, backbone: Backbone, shape: DrafterConfig, slots: int, max_len: int):
        self.backbone = backbone
        size = (slots, max_len, shape.num_kv_heads, shape.head_dim)
        self.layers = [(torch.zeros(size), torch.zeros(size)) for _ in range(shape.num_layers)]

    def write(self, rows: Tensor, lens: Tensor, features: Tensor) -> None:
        """Write features [R, q, m*d] at positions lens.. of slots `rows` [R].

        Rows after the accepted drafts may be written too: they are beyond the context that the next
        block sees, and the next write replaces them.
        """
        positions = lens[:, None] + torch.arange(features.shape[1])  # [R, q]
        fresh = self.backbone.context_kv(features, positions)
        for (keys, values), (k, v) in zip(self.layers, fresh, strict=True):
            keys[rows[:, None], positions] = k
            values[rows[:, None], positions] = v

    def read(self, rows: Tensor | None, length: int) -> list[ContextKV]:
        """Return the first `length` positions of slots `rows` (None: all, in order), per layer."""
        picked = slice(None) if rows is None else rows
        return [(k[picked, :length], v[picked, :length]) for k, v in self.layers]


class FeatureState:
    """State of a run's requests for a drafter that stores only the context.

    It is a parallel drafter's half of `families.proposer.DraftState`.
    """

    def __init__(self, backbone: Backbone, shape: DrafterConfig, slots: int, max_len: int):
        self.context = FeatureContext(backbone, shape, slots, max_len)

    def prefill(self, rows: Tensor, tokens: Tensor, features: Tensor, hidden: Tensor) -> None:
        """Write a prompt's features [R, P, m*d] into slots `rows` [R]."""
        self.context.write(rows, torch.zeros_like(rows), features)

    def commit(
        self,
        rows: Tensor,
        lens: Tensor,
        tokens: Tensor,
        features: Tensor,
        hidden: Tensor,
        accepted: Tensor,
    ) -> None:
        """Write features [R, q, m*d] of the verify window at positions lens.. to the context."""
        self.context.write(rows, lens, features)


def shorter_block(trained: DrafterConfig, gamma: int) -> DrafterConfig:
    """Return the drafter's shape for blocks of gamma drafts.

    Raises DSparkError for a larger block than it was trained for.
    """
    if gamma > trained.gamma:
        raise DSparkError(
            f"gamma {gamma} exceeds the block of {trained.gamma} that the drafter was trained for"
        )
    return replace(trained, gamma=gamma)
