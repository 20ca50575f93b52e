"""Compute the confidence of a drafted block in one call: logit_k = w [h_k; W1[x_{k-1}]] + b.

Paper, 3.2.1. Replaces `DSparkConfidenceHead.predict` (sglang/srt/models/dspark.py), a dozen small
tensor operations for about a thousand multiplications. A head or a tensor that csrc/heads.cpp does
not support uses the model's own `DSparkDraftMixin.compute_confidence`.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.csrc import operator
from sglang_dspark.backends.cpu.fast_paths import (
    find_or_log,
    require,
    require_class,
    require_library,
)
from sglang_dspark.serving import upstream

_P, _N = c_void_p, c_int64
_CONFIDENCE = ("confidence", _P, _N, _N, _N, _P, _P, _P, _P, _P, _N, _P)


# Weight [1, d + r], bias [1], W1 [V, r] (None for r = 0).
_Weights = tuple[Tensor, Tensor | None, Tensor | None]


def confidence_of(
    draft_model: Any, anchors: Tensor, drafts: Tensor, features: Tensor
) -> Tensor | None:
    """Return the confidence logits [R, d] of a block; None without a head.

    anchors: [R] int64, drafts: [R, d] int64, features: [R * d, n] float. Calibration
    (`step/engine.py`) converts the logits to survivals.
    """
    if draft_model.confidence_head is None:
        return None
    weights = find_or_log("confidence of a block in one call", lambda: _weights(draft_model))
    if weights is None or features.dtype is not torch.float32 or not features.is_contiguous():
        _, found = draft_model.compute_confidence(
            anchor_tokens=anchors, draft_tokens=drafts, confidence_features=features
        )
        return found
    run, width = operator(*_CONFIDENCE), features.shape[-1]
    assert run is not None
    anchors, drafts = anchors.contiguous(), drafts.contiguous()
    weight, bias, w1 = weights
    logits = torch.empty(drafts.shape)
    run(
        features.data_ptr(), *drafts.shape, width, anchors.data_ptr(), drafts.data_ptr(),
        weight.data_ptr(), None if bias is None else bias.data_ptr(),
        None if w1 is None else w1.data_ptr(), weight.shape[1] - width, logits.data_ptr(),
    )  # fmt: skip
    return logits


def _weights(draft_model: Any) -> _Weights:
    """Resolve the head's weights. Raises UnsupportedError if the operator cannot read them."""
    require_library()
    head, markov = draft_model.confidence_head, draft_model.markov_head
    require_class("its confidence head", head, upstream.DSparkConfidenceHead)
    w1 = None
    if head.with_markov:
        plain = type(markov).get_prev_embeddings is upstream.VanillaMarkov.get_prev_embeddings
        require(plain, f"{type(markov).__name__} embeds earlier tokens in a way of its own")
        require(markov.vocab_shard is None, "its vocabulary is split over ranks")
        w1 = markov.markov_w1.weight
    weights = (head.proj.weight, head.proj.bias, w1)
    tensors = [each for each in weights if each is not None]
    plain = all(t.is_cpu and t.dtype is torch.float32 and t.is_contiguous() for t in tensors)
    require(plain, "its weights are not float32 without gaps")
    return weights
