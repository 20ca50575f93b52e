"""Define the confidence head: c_k, the chance that position k is accepted if all before it were.

c_k (paper, 3.2.1) is a function of h_k and x_{k-1} only, never of x_k, so that admission by it is
lossless.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.config import DrafterConfig


class ConfidenceHead(nn.Module):
    """Logit of c_k from [h_k; W1[x_{k-1}]]."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.with_markov = c.confidence_head_with_markov
        width = c.hidden_size + (c.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, h: Tensor, embedded: Tensor) -> Tensor:
        """Map h [..., d] and embedded previous tokens [..., r] to logits [...]."""
        x = torch.cat([h, embedded], -1) if self.with_markov else h
        return self.proj(x.float()).squeeze(-1)
