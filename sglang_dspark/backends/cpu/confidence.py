"""Compute the confidence of a drafted block in one call: logit_k = w [h_k; W1[x_{k-1}]] + b.

Paper, 3.2.1. Replaces `DSparkConfidenceHead.predict` (sglang/srt/models/dspark.py), a dozen small
tensor operations around some thousand multiplications. A head or a tensor that the compiled loop
does not support keeps the model's own `DSparkDraftMixin.compute_confidence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.backends.cpu.fast_paths import find_or_log, require, require_class
from sglang_dspark.backends.cpu.jit import kernel
from sglang_dspark.backends.cpu.lanes import dots
from sglang_dspark.float_ops import exp32
from sglang_dspark.serving import upstream

_NO_W1 = np.empty((0, 0), np.float32)  # for a head that does not read W1


@dataclass(frozen=True)
class ConfidenceWeights:
    """weight: [1, d + r]; bias: [1]; w1: [V, r], or None for r = 0; temperature: [1] or [gamma].

    All float32 and contiguous; values updated in place are used at once.
    """

    weight: Tensor
    bias: Tensor | None
    w1: Tensor | None
    temperature: Tensor

    @property
    def supported(self) -> bool:
        """Return whether the compiled loop supports them."""
        tensors = [
            self.weight,
            self.temperature,
            *(t for t in (self.bias, self.w1) if t is not None),
        ]
        return all(t.is_cpu and t.dtype is torch.float32 and t.is_contiguous() for t in tensors)

    def arrays(self) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        """Return W, b, W1 and temperatures as views of the tensors."""
        bias = np.zeros(1, np.float32) if self.bias is None else self.bias.detach().numpy()
        w1 = _NO_W1 if self.w1 is None else self.w1.detach().numpy()
        return self.weight.detach().numpy(), bias, w1, self.temperature.detach().numpy().reshape(-1)


@kernel
def _confidence(  # type: ignore[no-untyped-def]
    features, anchor, drafts, weight, bias, w1, temperature, survival, logits
):
    requests, depth = drafts.shape
    width = features.shape[1]
    rank = weight.shape[1] - width
    for r in range(requests):
        for k in range(depth):
            row = features[r * depth + k]
            total = bias[0] + dots((row,), (weight[0, :width],))[0]
            if rank > 0:
                before = w1[anchor[r] if k == 0 else drafts[r, k - 1]]
                total += dots((before,), (weight[0, width:],))[0]
            logits[r, k] = total
            scaled = total / temperature[k if temperature.shape[0] > 1 else 0]
            survival[r, k] = np.float32(1.0) / (np.float32(1.0) + exp32(-scaled))


def confidence(
    weights: ConfidenceWeights, features: Tensor, anchor: Tensor, drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute conditional survivals sigmoid(logit / T) and logits of a block, [R, d] float32.

    features: [R * d, width] float32, contiguous; anchor: [R] int64; drafts: [R, d] int64.
    """
    survival, logits = torch.empty(2, *drafts.shape).unbind()
    _confidence(
        features.numpy(), np.ascontiguousarray(anchor.numpy()), drafts.numpy(), *weights.arrays(),
        survival.numpy(), logits.numpy(),
    )  # fmt: skip
    return survival, logits


def confidence_of(
    draft_model: Any, anchors: Tensor, drafts: Tensor, features: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return conditional survivals [R, d] of drafts [R, d] and their logits; None without a head.

    anchors: [R] int64. features: [R * d, n], float.
    """
    if draft_model.confidence_head is None:
        return None, None
    weights = find_or_log("confidence of a block in one call", lambda: _weights(draft_model))
    if weights is None or features.dtype is not torch.float32 or not features.is_contiguous():
        survivals, logits = draft_model.compute_confidence(
            anchor_tokens=anchors, draft_tokens=drafts, confidence_features=features
        )
        return survivals, logits
    return confidence(weights, features.view(-1, features.shape[-1]), anchors, drafts)


def _weights(draft_model: Any) -> ConfidenceWeights:
    """Resolve the head's weights. Raises UnsupportedError if the compiled loop cannot read them."""
    head, markov = draft_model.confidence_head, draft_model.markov_head
    require_class("its confidence head", head, upstream.DSparkConfidenceHead)
    w1 = None
    if head.with_markov:
        plain = type(markov).get_prev_embeddings is upstream.VanillaMarkov.get_prev_embeddings
        require(plain, f"{type(markov).__name__} embeds earlier tokens in a way of its own")
        require(markov.vocab_shard is None, "its vocabulary is split over ranks")
        w1 = markov.markov_w1.weight
    weights = ConfidenceWeights(head.proj.weight, head.proj.bias, w1, head.sts_temperatures)
    require(weights.supported, "its weights are not float32 without gaps")
    return weights
