"""The confidence of a drafted block without a chain of small tensor operations.

A head or a tensor that the compiled loop does not read keeps the model's own
`DSparkDraftMixin.compute_confidence` (sglang/srt/models/dspark.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.confidence_ops import ConfidenceWeights, confidence
from sglang_dspark.backends.cpu.fast_paths import need, need_class, taken
from sglang_dspark.serving import upstream


def confidence_of(
    draft_model: Any, anchors: Tensor, drafts: Tensor, features: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return conditional survivals [R, d] of drafts [R, d] and their logits; None without a head.

    anchors: [R] int64. features: [R * d, n], float.
    """
    if draft_model.confidence_head is None:
        return None, None
    weights = taken("confidence of a block in one call", lambda: _weights(draft_model))
    if weights is None or features.dtype is not torch.float32 or not features.is_contiguous():
        survivals, logits = draft_model.compute_confidence(
            anchor_tokens=anchors, draft_tokens=drafts, confidence_features=features
        )
        return survivals, logits
    return confidence(weights, features.view(-1, features.shape[-1]), anchors, drafts)


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
