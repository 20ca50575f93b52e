"""What the parallel drafters keep of a sequence: the target's features as keys and values of every
draft layer (paper, 3.1.1), in slots that requests come to and leave.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.drafter.attention import ContextKV
from sglang_dspark.drafter.backbone import Backbone
from sglang_dspark.drafter.config import DrafterConfig


class FeatureContext:
    """Keys and values [slots, max_len, Hkv, D] of each draft layer."""

    def __init__(self, backbone: Backbone, shape: DrafterConfig, slots: int, max_len: int):
        self.backbone = backbone
        size = (slots, max_len, shape.num_kv_heads, shape.head_dim)
        self.layers = [(torch.zeros(size), torch.zeros(size)) for _ in range(shape.num_layers)]

    def write(self, rows: Tensor, lens: Tensor, features: Tensor) -> None:
        """Features [R, q, m*d] at positions lens.. of slots `rows` [R].

        Rows behind the accepted drafts may be written too: they lie beyond the context that the
        next block sees and the next write replaces them.
        """
        positions = lens[:, None] + torch.arange(features.shape[1])  # [R, q]
        fresh = self.backbone.context_kv(features, positions)
        for (keys, values), (k, v) in zip(self.layers, fresh, strict=True):
            keys[rows[:, None], positions] = k
            values[rows[:, None], positions] = v

    def read(self, rows: Tensor | None, length: int) -> list[ContextKV]:
        """The first `length` positions of slots `rows` (None: all, in order), per layer."""
        picked = slice(None) if rows is None else rows
        return [(k[picked, :length], v[picked, :length]) for k, v in self.layers]
