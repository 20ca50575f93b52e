"""Attention through torch's scaled_dot_product_attention: half-precision caches, capped scores.

One product per request: prefill lengths differ, and at these sizes the matrix work dominates. K
and V are read as a view where the request's slots are consecutive, which fresh prefills are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.plan import CACHED, FIRST, QUERIES, AttentionPlan


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    layer: Any,
    causal: bool,
    window: int,
    out: Tensor,
) -> None:
    """Attend every query token of `plan`, written to `out` in the queries' type.

    queries: [T, H, D]. keys: [S, Hkv, D], values: [S, Hkv, Dv], any float type. layer:
    `RadixAttention`, read for `scaling` and `logit_cap`. window < 0 means none. out: [T, H, Dv].
    """
    for r, (first, count, cached) in enumerate(plan.requests[:, [FIRST, QUERIES, CACHED]].tolist()):
        if count == 0:
            continue
        slots = plan.slots[r]
        k = keys[slots].to(queries.dtype).transpose(0, 1)  # [Hkv, L, D]
        v = values[slots].to(queries.dtype).transpose(0, 1)  # [Hkv, L, Dv]
        q = queries[first : first + count].transpose(0, 1)  # [H, n, D]
        square = causal and window < 0 and plan.trees.size == 0 and count == cached
        if layer.logit_cap:
            mask = plan.mask(r, causal, window, queries.dtype)
            mixed = _capped(q, k, v, mask, layer.scaling, layer.logit_cap)
        else:
            mask = None if square else plan.mask(r, causal, window, queries.dtype)
            mixed = _plain(q, k, v, mask, square, layer.scaling)
        out[first : first + count] = mixed.transpose(0, 1)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, square: bool, scale: float
) -> Tensor:
    """q [H, n, D], k [Hkv, L, D], v [Hkv, L, Dv] -> [H, n, Dv]; square: plain causal, n == L."""
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=square, scale=scale, enable_gqa=True
    )
    return mixed[0]


def _capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """As `_plain`, with scores squashed to cap * tanh(score / cap) before the softmax."""
    group = q.shape[0] // k.shape[0]
    grouped = q.reshape(k.shape[0], group * q.shape[1], q.shape[2])  # heads of a group are rows
    scores = torch.bmm(grouped, k.transpose(1, 2)) * scale
    scores = (cap * torch.tanh(scores / cap)).view(k.shape[0], group, q.shape[1], k.shape[1])
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1).view(k.shape[0], group * q.shape[1], k.shape[1])
    return torch.bmm(weights, v).view(q.shape[0], q.shape[1], v.shape[2])
