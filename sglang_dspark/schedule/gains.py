"""Compute gains from confidences: the sequential product of `survival`, compiled, times weights.

The float32 operations and their order equal `sglang_dspark.schedule.survival`, so both results are
bitwise equal. This function writes to memory that the caller owns and takes microseconds.
"""

from __future__ import annotations

import numpy as np

from sglang_dspark.schedule.budget import Gains
from sglang_dspark.schedule.compiled import compiled

_UNIT: Gains = np.empty(0, np.float32)  # means a weight of 1 for every request


def gains(confidence: Gains, weights: Gains | None = None, out: Gains | None = None) -> Gains:
    """Return w_r a_{r,j}: [R, gamma] float32, non-increasing along gamma as executed.

    confidence: [R, gamma] float32 in [0, 1], calibrated. weights: [R] float32 >= 0, weight of a
    token of each request (default 1; more for a request behind its speed target). They must be
    known before this step's drafting. out: [R, gamma] float32 to write to; may be `confidence`.
    Raises ValueError on mismatched shapes, NaN, or a confidence outside [0, 1].
    """
    rows = len(confidence)
    if confidence.dtype != np.float32 or confidence.ndim != 2:
        raise ValueError(f"confidence must be [R, gamma] float32, not {confidence.dtype}")
    scale = _UNIT if weights is None else weights
    result = np.empty_like(confidence) if out is None else out
    if (scale.shape != (rows,) and weights is not None) or result.shape != confidence.shape:
        raise ValueError(f"weights {scale.shape} and out {result.shape} for {confidence.shape}")
    if not _gains(confidence, scale, result):
        raise ValueError("confidence must lie in [0, 1] and weights be >= 0, without NaN")
    return result


def speed_weights(speed: Gains, target: Gains, most: float = 4.0) -> Gains:
    """Return weights [R] of requests with a speed target: target / speed, between 1 and `most`.

    speed, target: [R] float32 tokens/s so far and wanted; target 0 means no target. The weight of a
    request without a speed yet is 1.
    """
    behind = np.where((target > 0) & (speed > 0), target / np.maximum(speed, 1e-9), 1.0)
    return np.clip(behind, 1.0, most).astype(np.float32)


@compiled
def _gains(confidence, weights, out):  # type: ignore[no-untyped-def]
    rows, gamma = confidence.shape
    valid = True
    for r in range(rows):
        running = np.float32(1.0)
        weight = weights[r] if len(weights) else np.float32(1.0)
        valid = valid and bool(weight >= 0 and weight < np.inf)
        for j in range(gamma):
            factor = confidence[r, j]
            valid = valid and bool(factor >= 0 and factor <= 1)
            running = np.float32(running * factor)
            out[r, j] = np.float32(running * weight)
    return valid
