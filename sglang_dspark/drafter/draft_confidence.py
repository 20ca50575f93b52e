"""Estimate confidence from the draft's distribution, for drafters without a confidence head.

A position's confidence logit is log(p / (1 - p)), where p is the largest probability of the
distribution that its token is drawn from. The calibration of confidence heads then learns a slope
and a shift for each position (`schedule/online.py`, `schedule/calibration.py`). So the confidence
is a monotone function of p.

It keeps admission lossless (docs/losslessness.md, "Windows chosen by confidence"). The logits of
position k are a function of h_k and of x_{<k} only: of h_k for a parallel head, and also of x_{k-1}
for a sequential one. They are the parameters of the distribution that x_k is drawn from, so they
exist before x_k does, and their maximum is the same for every outcome of the draw. The probability
of the drawn token, p_d(x_k), is not: a window shortened because it is low removes this token from
the output's distribution. So this module never gets a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

# 1 - p of a float32 probability that rounds to 1 (half a unit of the last place): the logit is
# 16.6, beyond the calibration's own limit of 15.
LEAST_REST = 2.0**-24
_AT_ONCE = 1 << 24  # probabilities: 64 MB


def draft_confidence(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Return log(p / (1 - p)) for p = max softmax(logits / T), [R, d] float32.

    logits: [R, d, n] of the draft positions, -inf for tokens that cannot be drafted. temperature:
    [R] of the requests, 0 for greedy ones, which count as 1; None: all greedy. NaN if a position
    has NaN logits or no token.
    """
    if temperature is None:
        temperature = logits.new_zeros(len(logits), dtype=torch.float32)
    scale = temperature.where(temperature > 0, 1.0)[:, None, None]
    rows = max(_AT_ONCE // logits[0].numel(), 1)
    parts = zip(logits.split(rows), scale.split(rows), strict=True)
    return torch.cat([certainty(torch.softmax(part.float() / t, -1)) for part, t in parts])


def certainty(probs: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the largest probability p of each row, [..., n] -> [...]."""
    largest = probs.amax(-1)
    return -((1.0 - largest) / largest).clamp_min(LEAST_REST).log()
