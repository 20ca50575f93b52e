"""Reduced draft vocabulary against upstream's own draft path on the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.heads import MarkovHead, restrict_vocabulary
from sglang_dspark.serving.cpu import draft_head

V, D, RANK, GAMMA, INSIDE = 160, 32, 16, 5, 48


@dataclass(frozen=True)
class Weights:
    """w1, w2 [V, RANK] of a head restricted to `allowed` [INSIDE]; lm_head [V, D]."""

    w1: Tensor
    w2: Tensor
    lm_head: Tensor
    allowed: Tensor


@pytest.fixture
def weights() -> Weights:
    generator = torch.Generator().manual_seed(7)
    head = SimpleNamespace(
        markov_w1=SimpleNamespace(weight=torch.randn(V, RANK, generator=generator)),
        markov_w2=SimpleNamespace(weight=torch.randn(V, RANK, generator=generator) * 0.5),
    )
    allowed = torch.randperm(V, generator=generator)[:INSIDE].sort().values
    restrict_vocabulary(head, allowed)  # type: ignore[arg-type]
    return Weights(
        w1=head.markov_w1.weight,
        w2=head.markov_w2.weight,
        lm_head=torch.randn(V, D, generator=generator) * 0.3,
        allowed=allowed,
    )


class Upstream:
    """Upstream's Markov head, LM head and noise around `weights`."""

    def __init__(self, weights: Weights) -> None:
        from sglang.srt.models.dspark import DSparkDraftMixin, VanillaMarkov
        from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise

        self.markov_head = VanillaMarkov(vocab_size=V, markov_rank=RANK)
        with torch.no_grad():
            self.markov_head.markov_w1.weight.copy_(weights.w1)
            self.markov_head.markov_w2.weight.copy_(weights.w2)
        self.lm_head = torch.nn.Linear(D, V, bias=False)
        self.lm_head.weight = torch.nn.Parameter(weights.lm_head, requires_grad=False)
        self.logits_mup_width_multiplier: float | None = None
        self.noise = DraftNoise(key=11, offset=torch.zeros(1, dtype=torch.int64))
        self.compute_base_logits = lambda hidden: (
            torch.matmul(hidden, weights.lm_head.T),
            hidden,
        )
        self.mixin = DSparkDraftMixin

    def draft(self, base: Tensor, anchor: Tensor, sampling: Any, hooked: bool) -> Any:
        from sglang.srt.speculative.dspark_components.dspark_draft import sample_draft_block

        from sglang_dspark.patches import cpu_draft_vocabulary

        arguments = {
            "base_logits": base,
            "anchor_tokens": anchor,
            "draft_hidden": None,
            "sampling_info": sampling,
            "markov_head": self.markov_head,
            "noise": self.noise,
            "device": torch.device("cpu"),
            "tp_sync": SimpleNamespace(sync=lambda site, tokens: tokens),
            "greedy_draft": False,
        }
        if hooked:
            return cpu_draft_vocabulary.sample_draft_block(sample_draft_block, **arguments)
        return sample_draft_block(**arguments)
