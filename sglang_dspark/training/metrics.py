"""Compute metrics of a training step: loss, expected tau, distance of confidence from acceptance.

All are sums, which add up over batches and processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.families.learning.losses import LossParts

SUMS = 8  # of `block_sums`
_BINS = 10


def block_sums(parts: LossParts, valid: Tensor) -> Tensor:
    """Return the sums of a batch, [SUMS] float64.

    They are loss * weight; weight; sum of expected tau over whole blocks; their number; the loss's
    three terms * weight; positions with a token to learn. valid: [P, gamma]. tau counts the bonus
    token: 1 + sum_k prod_{i<=k} accept_i, with the acceptance rates along the target's own tokens.
    """
    full = valid.all(1)
    accept = parts.accept.detach().view(valid.shape)[full].double()
    tau = (1 + accept.cumprod(1).sum(1)).sum()
    weight = parts.weight.detach().double()
    whole = torch.stack([parts.total.detach().double() * weight, weight, tau, full.sum().double()])
    return torch.cat([whole, parts.terms.double() * weight, valid.sum().double()[None]])


def survival_sums(parts: LossParts, valid: Tensor) -> Tensor:
    """Sum predicted, actual survival of whole blocks by predicted survival, [2, bins] float64."""
    sums = torch.zeros(2, _BINS, dtype=torch.float64, device=valid.device)
    if parts.confidence is None:
        return sums
    full = valid.all(1)
    confidence = torch.sigmoid(parts.confidence.view(valid.shape)[full].double())
    predicted = confidence.cumprod(1).flatten()
    actual = parts.accept.detach().view(valid.shape)[full].double().cumprod(1).flatten()
    bins = (predicted * _BINS).long().clamp(max=_BINS - 1)
    sums[0].index_add_(0, bins, predicted)
    sums[1].index_add_(0, bins, actual)
    return sums


def loss_and_tau(sums: Tensor) -> dict[str, float]:
    """Return the means of the sums of `block_sums`.

    tau is 0 if no block was whole, `loss_confidence` without a confidence head.
    """
    total, weight, tau, blocks, ce, tv, confidence, _ = sums.tolist()
    return {
        "loss": total / weight,
        "tau": tau / blocks if blocks else 0.0,
        "loss_ce": ce / weight,
        "loss_tv": tv / weight,
        "loss_confidence": confidence / weight,
    }


def expected_calibration_error(sums: Tensor, positions: float) -> float:
    """Return the mean over `positions` of |predicted - actual| in bins of `survival_sums`."""
    return float((sums[0] - sums[1]).abs().sum()) / max(positions, 1.0)
