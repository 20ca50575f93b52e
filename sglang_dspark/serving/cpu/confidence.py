"""The confidence of a drafted block without a chain of small tensor operations.

Upstream: sglang/srt/models/dspark.py, `DSparkDraftMixin.compute_confidence`. A head or a
tensor that the compiled loop does not read keeps upstream's path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving import upstream
from sglang_dspark.serving.cpu.confidence_ops import ConfidenceWeights, confidence
from sglang_dspark.serving.cpu.fast_paths import need, need_class, taken


def compute_confidence(
    original: Callable[..., tuple[Tensor, Tensor]], draft_model: Any, **block: Tensor
) -> tuple[Tensor, Tensor]:
    """AROUND hook: [R, d] conditional survivals and their logits."""
    features = block["confidence_features"]
    weights = taken("confidence of a block in one call", lambda: _weights(draft_model))
    if weights is None or features.dtype is not torch.float32 or not features.is_contiguous():
        return original(draft_model, **block)
    rows = features.view(-1, features.shape[-1])
    return confidence(weights, rows, block["anchor_tokens"], block["draft_tokens"])


def _weights(draft_model: Any) -> ConfidenceWeights:
    """The head's weights. Raises UnfitError where they are not what the compiled loop reads."""
    head, markov = draft_model.confidence_head, draft_model.markov_head
    need_class("its confidence head", head, upstream.DSparkConfidenceHead)
    w1 = None
    if head.with_markov:
        plain = type(markov).get_prev_embeddings is upstream.VanillaMarkov.get_prev_embeddings
        need(plain, f"{type(markov).__name__} embeds earlier tokens in a way of its own")
        need(markov.vocab_shard is None, "its vocabulary is split over ranks")
        w1 = markov.markov_w1.weight
    found = ConfidenceWeights(head.proj.weight, head.proj.bias, w1, head.sts_temperatures)
    need(found.fits, "its weights are not float32 without gaps")
    return found
