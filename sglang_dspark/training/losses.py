"""The paper's objective (3.3, eqs. 8-12), fused so that one tensor of vocabulary size is kept.

    L = sum_k w_k (a_ce CE_k + a_tv TV_k + a_conf BCE_k) / sum_k w_k,   w_k = exp(-(k-1)/gamma)

CE against the target's token, TV = (1/2) sum_v |p_t - p_d|, and the confidence is taught the exact
acceptance rate 1 - TV = sum_v min(p_t, p_d) of its position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.training.config import ObjectiveConfig


def position_weights(gamma: int) -> Tensor:
    """w_k = exp(-(k-1)/gamma), k = 1..gamma: [gamma]."""
    return torch.exp(-torch.arange(gamma, dtype=torch.float32) / gamma)


class _DraftLaw(torch.autograd.Function):
    """Weighted CE and TV of N positions, with the gradient made in the forward pass in place of
    the probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [N, V'] draft logits
        law: Tensor,  # [N, V'] target probabilities (rows may sum to less than 1)
        label: Tensor,  # [N] column of the target's token, -1 outside the draft vocabulary
        weight: Tensor,  # [N]
        ce: float,
        tv: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        draft = torch.softmax(logits.float(), -1)
        overlap = torch.minimum(draft, law).sum(-1)  # acceptance rate; TV = 1 - overlap
        inside = label >= 0
        column = label.clamp(min=0)[:, None]
        chosen = draft.gather(-1, column)[:, 0].clamp(min=1e-12)
        nll = torch.where(inside, -chosen.log(), 0.0)
        above = (draft > law).to(draft.dtype)  # d(1 - overlap)/d draft = [draft > law], up to a constant
        slope = (draft * above).sum(-1, keepdim=True)
        ce_weight = (weight * inside * ce)[:, None]
        grad = draft * (above - slope) * (tv * weight)[:, None] + draft * ce_weight
        grad.scatter_add_(-1, column, -ce_weight)
        ctx.save_for_backward(grad.to(logits.dtype))
        loss = (weight * (ce * nll + tv * (1 - overlap))).sum()
        ctx.mark_non_differentiable(overlap, nll)
        return loss, overlap, nll

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * scale, None, None, None, None, None


@dataclass(frozen=True)
class LossParts:
    """total: scalar to differentiate; accept, nll [N] per position, no gradient."""

    total: Tensor
    accept: Tensor
    nll: Tensor


def dspark_loss(
    logits: Tensor,
    law: Tensor,
    label: Tensor,
    confidence: Tensor,
    weight: Tensor,
    objective: ObjectiveConfig,
) -> LossParts:
    """The three losses over N positions.

    logits, law [N, V']; label [N] (column in V', -1 when outside); confidence [N] logits; weight
    [N], 0 for padding. The weights are normalised to sum 1.
    """
    weight = weight / weight.sum().clamp(min=1e-9)
    drafted, accept, nll = _DraftLaw.apply(
        logits, law, label, weight, objective.ce, objective.tv
    )
    bce = torch.nn.functional.binary_cross_entropy_with_logits(
        confidence.float(), accept.detach().clamp(0, 1), reduction="none"
    )
    return LossParts(drafted + objective.confidence * (weight * bce).sum(), accept, nll)
