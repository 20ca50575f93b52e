"""The walk of the block rule as one compiled loop: the mathematics is verify/block.py.

A window is walked from its end, so the vocabulary is summed over only behind drafts that may still
be the last one kept.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.jit import kernel

_LANES = 256  # sums at once: enough for a loop over them to use vector registers


@kernel
def _left(target, chance, proposal):  # type: ignore[no-untyped-def]
    """S_i of one row: sum_x max(chance * target(x) - proposal(x), 0), the sum of _LANES sums."""
    lanes, whole = np.zeros(_LANES), len(target) // _LANES * _LANES
    for start in range(0, whole, _LANES):
        for lane in range(_LANES):
            v = start + lane
            lanes[lane] += max(chance * np.float64(target[v]) - np.float64(proposal[v]), 0.0)
    for v in range(whole, len(target)):
        lanes[v - whole] += max(chance * np.float64(target[v]) - np.float64(proposal[v]), 0.0)
    return lanes.sum()


@kernel
def _walk(draft, proposals, targets, uniforms, limits, accepted, chances):  # type: ignore[no-untyped-def]
    standing = np.ones(draft.shape[1] + 1)  # p_0 .. p_l
    for r in range(draft.shape[0]):
        length = limits[r]
        for i in range(length):
            mass = standing[i] * np.float64(targets[r, i, draft[r, i]])
            proposed = np.float64(proposals[r, i, draft[r, i]])
            enough = 1.0 if mass > 0 else 0.0
            standing[i + 1] = mass / proposed if mass < proposed else enough
        kept = 0
        for i in range(length, 0, -1):
            p, u = standing[i], uniforms[r, i - 1]
            if i == length:
                stands = u < p
            else:
                left = _left(targets[r, i], p, proposals[r, i])
                refused = left + (1.0 - p)
                stands = u * refused < left or refused == 0
            if stands:
                kept = i
                break
        accepted[r] = kept
        chances[r] = standing[kept]


def walk(
    draft: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor]:
    """`verify.block.walk` on a CPU; float64 sums in another order.

    draft: [R, gamma] int64. draft_probs: [R, gamma, V], target_probs: [R, gamma + 1, V] float32.
    uniforms: [R, gamma] float64. limits: [R] int64. Returns accepted [R] int64, p_tau [R] float64.
    """
    accepted = torch.empty(len(draft), dtype=torch.int64)
    chances = torch.empty(len(draft), dtype=torch.float64)
    _walk(
        draft.contiguous().numpy(),
        draft_probs.contiguous().numpy(),
        target_probs.contiguous().numpy(),
        uniforms.contiguous().numpy(),
        limits.contiguous().numpy(),
        accepted.numpy(),
        chances.numpy(),
    )
    return accepted, chances
