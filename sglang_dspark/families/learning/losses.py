"""Compute the paper's objective (3.3, eqs. 8-12), keeping one tensor of vocabulary size.

    L = sum_k w_k (a_ce CE_k + a_tv L1_k + a_conf BCE_k) / sum_k w_k,   w_k = exp(-(k-1)/gamma)

CE is against the target's token, or against its distribution as Eagle3 is trained (`soft_labels`);
`decay` replaces gamma in w_k. L1 = sum_v |p_t - p_d| (eq. 10) is the whole L1 norm, twice the total
variation distance TV. The confidence is taught the exact acceptance rate of its position, 1 - TV =
sum_v min(p_t, p_d). v runs over the target's whole vocabulary. Outside a reduced draft vocabulary
p_d is 0, so the target's mass there is a part of L1 that no draft can lower, and p_t is not
renormalised inside. So L1 = 2 (1 - sum_v min(p_t, p_d)), summed over the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.families.learning.objective import ObjectiveConfig

_CHUNK = {"cpu": 32}  # rows at a time: few enough to stay in cache
_CHUNK_ELSEWHERE = 1024


def position_weights(gamma: int, decay: float | None) -> Tensor:
    """Return w_k = exp(-(k-1)/decay), k = 1..gamma: [gamma]. decay: None for gamma."""
    return torch.exp(-torch.arange(gamma, dtype=torch.float32) / (decay or gamma))


class _DraftDistribution(torch.autograd.Function):
    """Weighted CE and L1 of N positions.

    Rows are processed in chunks that stay in cache. The forward pass also computes the gradient,
    the only tensor of vocabulary size that is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [N, V'] draft logits
        target: Tensor,  # [N, V'] target logits
        log_partition: Tensor,  # [N] of the target, over its whole vocabulary
        label: Tensor,  # [N] column of the target's token, -1 outside the draft vocabulary
        weight: Tensor,  # [N]
        objective: ObjectiveConfig,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ce, tv = objective.ce, objective.tv
        overlap, nll = torch.empty_like(weight), torch.empty_like(weight)
        grad = torch.empty_like(logits)
        chunk = _CHUNK.get(logits.device.type, _CHUNK_ELSEWHERE)
        for start in range(0, len(logits), chunk):
            rows = slice(start, start + chunk)
            draft = torch.softmax(logits[rows].float(), -1)
            distribution = (target[rows].float() - log_partition[rows, None]).exp_()
            overlap[rows] = torch.minimum(draft, distribution).sum(-1)  # acceptance rate, 1 - TV
            if objective.soft_labels:
                nll[rows], pull = _soft_cross_entropy(logits[rows], draft, distribution)
            else:
                nll[rows], pull = _cross_entropy(draft, label[rows])
            # d L1 / d p_d is 2 [p_d > p_t] - 1; the softmax's Jacobian removes the constant
            above = torch.gt(draft, distribution, out=distribution)
            slope = (draft * above).sum(-1, keepdim=True)
            above.sub_(slope).mul_((2 * tv * weight[rows])[:, None]).mul_(draft)
            above.addcmul_(pull, (ce * weight[rows])[:, None])
            grad[rows] = above.to(grad.dtype)
        ctx.save_for_backward(grad)
        loss = (weight * (ce * nll + 2 * tv * (1 - overlap))).sum()
        ctx.mark_non_differentiable(overlap, nll)
        return loss, overlap, nll

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * scale, None, None, None, None, None


def _cross_entropy(draft: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log draft[label], [n], and its gradient in the logits, [n, V']; 0 for label -1."""
    inside, column = label >= 0, label.clamp(min=0)[:, None]
    nll = -draft.gather(-1, column)[:, 0].clamp(min=1e-12).log()
    pull = draft * inside[:, None]
    return nll * inside, pull.scatter_add_(-1, column, -inside[:, None].to(pull.dtype))


def _soft_cross_entropy(
    logits: Tensor, draft: Tensor, distribution: Tensor
) -> tuple[Tensor, Tensor]:
    """Return -sum_v p_t(v) log p_d(v), [n], and its gradient in the logits, [n, V'].

    v runs over the draft vocabulary, on which the target's mass may be below 1.
    """
    nll = -(distribution * torch.log_softmax(logits.float(), -1)).sum(-1)
    return nll, draft * distribution.sum(-1, keepdim=True) - distribution


@dataclass(frozen=True)
class LossParts:
    """Losses of a batch.

    total: scalar to differentiate, a mean over `weight`. weight: the sum of the positions' weights,
    so that total * weight adds up over parts of a batch. accept, nll: [N = P * gamma] per position,
    no gradient. terms: [3] means of CE, L1 and BCE, no gradient, whose sum by the objective's
    weights is total. confidence: [N] logits, or None for a drafter without a confidence head.
    """

    total: Tensor
    weight: Tensor
    accept: Tensor
    nll: Tensor
    terms: Tensor
    confidence: Tensor | None = None


def dspark_loss(
    logits: Tensor,
    target: Tensor,
    log_partition: Tensor,
    label: Tensor,
    confidence: Tensor | None,
    weight: Tensor,
    objective: ObjectiveConfig,
) -> LossParts:
    """Compute the three losses over N positions.

    logits, target [N, V'] of draft and target; log_partition [N]: logsumexp of the target over its
    whole vocabulary; label [N] (column in V', -1 if outside); confidence [N] logits, None without a
    confidence head; weight [N], 0 for padding. The weights are normalised to sum 1.
    """
    total_weight = weight.sum().clamp(min=1e-9)
    weight = weight / total_weight
    drafted, accept, nll = _DraftDistribution.apply(
        logits, target, log_partition, label, weight, objective
    )
    terms = torch.stack([weight @ nll, 2 * weight @ (1 - accept), torch.zeros_like(weight.sum())])
    if confidence is None:
        return LossParts(drafted, total_weight, accept, nll, terms)
    bce = torch.nn.functional.binary_cross_entropy_with_logits(
        confidence.float(), accept.clamp(0, 1), reduction="none"
    )
    taught = (weight * bce).sum()
    terms[2] = taught.detach()
    total = drafted + objective.confidence * taught
    return LossParts(total, total_weight, accept, nll, terms, confidence.detach())
