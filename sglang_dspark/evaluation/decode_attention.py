"""Compute attention of one new token per row over a bfloat16 slot cache, on a CPU.

Writing answers is one long decode of many rows of different lengths. torch attends over all rows at
the length of the longest, which is slow; this kernel reads each row's own keys and values, once for
all query heads of a group.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from sglang_dspark.float_ops import exp32

_HALF_BITS = np.int32(16)
_compiled = njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, error_model="numpy")


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Attend with each row's query to its first keys; return [R, Hq, D] float32.

    query [R, Hq, D] float32; keys, values [R, Hkv, T, D] bfloat16, views of a longer cache are
    fine; visible [R] int64, each in [1, T]: number of keys that a row sees.
    """
    out = torch.empty(query.shape, dtype=torch.float32)
    _attend(
        query.contiguous().numpy(),
        keys.view(torch.int16).numpy(),
        values.view(torch.int16).numpy(),
        visible.numpy(),
        np.float32(scale),
        out.numpy(),
    )
    return out


@_compiled
def _softmax(score, n):  # type: ignore[no-untyped-def]
    """Convert score[:n] to weights that sum to 1, in place."""
    top = score[0]
    for t in range(1, n):
        top = max(top, score[t])
    total = np.float32(0.0)
    for t in range(n):
        weight = exp32(score[t] - top)
        score[t] = weight
        total += weight
    for t in range(n):
        score[t] /= total


@_compiled
def _attend(query, keys, values, visible, scale, out):  # type: ignore[no-untyped-def]
    rows, heads, dim = query.shape
    kv_heads, longest = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    bits = np.empty(dim, np.int32)
    number = bits.view(np.float32)  # a bfloat16 is the upper half of a float32
    score = np.empty((group, longest), np.float32)
    out[:] = np.float32(0.0)
    for r in range(rows):
        n = visible[r]
        for h in range(kv_heads):
            for t in range(n):
                for d in range(dim):
                    bits[d] = np.int32(keys[r, h, t, d]) << _HALF_BITS
                for g in range(group):
                    dot = np.float32(0.0)
                    for d in range(dim):
                        dot += number[d] * query[r, h * group + g, d]
                    score[g, t] = dot * scale
            for g in range(group):
                _softmax(score[g], n)
            for t in range(n):
                for d in range(dim):
                    bits[d] = np.int32(values[r, h, t, d]) << _HALF_BITS
                for g in range(group):
                    weight = score[g, t]
                    for d in range(dim):
                        out[r, h * group + g, d] += weight * number[d]
