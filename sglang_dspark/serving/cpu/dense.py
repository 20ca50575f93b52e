"""Attention through torch's scaled_dot_product_attention: long prefills, half-precision caches.

One product per request: prefill lengths differ, and at these sizes the matrix work dominates. K
and V are read as a view where the request's slots are consecutive, which fresh prefills are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving.cpu.plan import AttentionPlan


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    layer: Any,
    causal: bool,
    window: int,
) -> Tensor:
    """queries [T, H, D], cache [S, Hkv, D] and [S, Hkv, Dv] -> [T, H, Dv] in the queries' type.

    layer: `RadixAttention`, read for `scaling` and `logit_cap`. window < 0 means none.
    """
    out = queries.new_empty(queries.shape[0], queries.shape[1], values.shape[2])
    for r in range(plan.req_rows.size):
        first, count = int(plan.query_start[r]), int(plan.query_lens[r])
        if count == 0:
            continue
        slots = consecutive(plan.slots(r))
        k = keys[slots].to(queries.dtype).transpose(0, 1)  # [Hkv, L, D]
        v = values[slots].to(queries.dtype).transpose(0, 1)  # [Hkv, L, Dv]
        q = queries[first : first + count].transpose(0, 1)  # [H, n, D]
        tree = None if plan.tree is None else torch.from_numpy(plan.tree[r])
        visible = visibility(count, k.shape[1], causal, window, tree)
        if layer.logit_cap:
            mixed = _capped(q, k, v, visible, layer.scaling, layer.logit_cap)
        else:
            square = causal and window < 0 and tree is None and count == k.shape[1]
            mixed = _plain(q, k, v, None if square else visible, square, layer.scaling)
        out[first : first + count] = mixed.transpose(0, 1)
    return out


def consecutive(slots: Tensor) -> Tensor | slice:
    """The slots [L] as a slice where each follows the one before: reading K is then a view."""
    if slots.numel() > 0:
        first, last = int(slots[0]), int(slots[-1])
        if last - first == slots.numel() - 1 and bool((slots.diff() == 1).all()):
            return slice(first, last + 1)
    return slots


def visibility(
    count: int, total: int, causal: bool, window: int, tree: Tensor | None = None
) -> Tensor | None:
    """Which of `total` positions the last `count` see: [count, total] bool, None for all."""
    if tree is None and window < 0 and (not causal or count == 1):
        return None
    key = torch.arange(total)[None, :]
    query = torch.arange(total - count, total)[:, None]
    seen = torch.ones(count, total, dtype=torch.bool)
    if tree is not None:
        seen[:, total - count :] = tree
    elif causal:
        seen &= key <= query
    if window >= 0:
        seen &= key >= query - window
    return seen


def _plain(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, square: bool, scale: float
) -> Tensor:
    """q [H, n, D], k [Hkv, L, D], v [Hkv, L, Dv] -> [H, n, Dv]; square: plain causal, n == L."""
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=visible, is_causal=square, scale=scale, enable_gqa=True
    )
    return mixed[0]


def _capped(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, cap: float
) -> Tensor:
    """As `_plain`, with scores squashed to cap * tanh(score / cap) before the softmax."""
    group = q.shape[0] // k.shape[0]
    grouped = q.reshape(k.shape[0], group * q.shape[1], q.shape[2])  # heads of a group are rows
    scores = torch.bmm(grouped, k.transpose(1, 2)) * scale
    scores = (cap * torch.tanh(scores / cap)).view(k.shape[0], group, q.shape[1], k.shape[1])
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = torch.softmax(scores, dim=-1).view(k.shape[0], group * q.shape[1], k.shape[1])
    return torch.bmm(weights, v).view(q.shape[0], q.shape[1], v.shape[2])
