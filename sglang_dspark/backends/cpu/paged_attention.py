"""Attend over a paged cache in place: float32 by csrc/attention.cpp, other types by torch.

softmax(q k^T scale) v for windows of any length: decode, verify, draft blocks and prefills. torch
would first gather every request's K and V into one padded tensor; the kernel reads the slot table
instead, computes all query heads of a group from one read of K and V, and pads nothing.
Sliding window: position p sees p - window .. p, as in sglang's `sliding_window_size`.

A query's result is bitwise the same in every window, batch and thread count. So the attention of
plain decoding and of verification agrees exactly, and so does that of prompts in one batch, in
several, or with a cached prefix.

`attend_by_torch` computes half-precision caches and capped scores, and all types without the
kernel: one product per request, as prefill lengths differ. K and V are read as a view where the
request's slots are consecutive, as those of new prefills are.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_dspark.backends.cpu.attention_plan import (
    CACHED,
    FIRST,
    QUERIES,
    AttentionPlan,
    PlanAddresses,
)
from sglang_dspark.backends.cpu.csrc import operator

NO_WINDOW = -1
_WORK_PER_THREAD = 1 << 16  # multiplications, a few microseconds
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64


class Attention(ctypes.Structure):
    """A layer's heads and cache, in the form of csrc/attention.h."""

    _fields_ = (
        *((name, _SIZE) for name in ("heads", "kv_heads", "width", "value_width")),
        ("keys", _ADDRESS),
        ("values", _ADDRESS),
        ("window", _SIZE),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_int32),
    )


class _Heads(ctypes.Structure):
    """Rows of heads, in the form of csrc/attention.h."""

    _fields_ = (("data", _ADDRESS), ("row_stride", _SIZE), ("head_stride", _SIZE))


_ARGUMENTS = (
    *(ctypes.POINTER(PlanAddresses), ctypes.POINTER(Attention)),
    *(_Heads, _Heads, _Heads, _ADDRESS, _SIZE, _ADDRESS, _SIZE),
)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    causal: bool,
    window: int,
    threads: int,
    out: Tensor,
    new: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Write the pass's own K and V, if given, then attend every query token of `plan`.

    q: [T, H, D]. k_cache: [S, Hkv, D], v_cache: [S, Hkv, Dv], contiguous; H a multiple of Hkv.
    window: earlier positions that a query sees, NO_WINDOW for all. threads: the most to use, of
    `threads.pool_threads`. out: [T, H, Dv], contiguous, written for the plan's tokens. new: (k [n,
    Hkv, D], v [n, Hkv, Dv], cache slots [n] int64). All float32, heads contiguous. Requires the
    operators of csrc.py. Raises TypeError for other types or strides, MemoryError.
    """
    attend = operator("attend", *_ARGUMENTS, returns=ctypes.c_int32)
    assert attend is not None
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and out.is_contiguous()):
        raise TypeError("the caches and the output of attention are not contiguous")
    _, kv_heads, width = k_cache.shape
    value_width = v_cache.shape[2]
    attention = Attention(
        q.shape[1], kv_heads, width, value_width, _address(k_cache), _address(v_cache), window,
        scale, causal,
    )  # fmt: skip
    k, v, slots = new or (q[:0], q[:0], torch.empty(0, dtype=torch.int64))
    if slots.dtype is not torch.int64 or not slots.is_contiguous():
        raise TypeError("cache slots are not contiguous torch.int64")
    failed = attend(
        plan.addresses, attention, _heads(q), _heads(k), _heads(v), slots.data_ptr(), len(slots),
        _address(out), threads_for(threads, plan, q.shape[1], width + value_width),
    )  # fmt: skip
    require_memory(failed)


def sliding_window_of(layer: Any) -> int:
    """Return the sliding window of a `RadixAttention`, NO_WINDOW for none."""
    window = layer.sliding_window_size
    return NO_WINDOW if window is None or window < 0 else int(window)


def require_memory(failed: int) -> None:
    """Raise MemoryError if an attention operator returned `failed`: it had no memory."""
    if failed:
        raise MemoryError("attention: a thread had no memory for its scores")


def threads_for(most: int, plan: AttentionPlan, heads: int, widths: int) -> int:
    """Limit the threads where waiting would cost more than computing; widths: D + Dv."""
    return max(1, min(most, plan.seen * heads * widths // _WORK_PER_THREAD))


def _address(rows: Tensor) -> int:
    if rows.dtype is not torch.float32:
        raise TypeError(f"attention over {rows.dtype}, not torch.float32")
    return rows.data_ptr()


def _heads(rows: Tensor) -> _Heads:
    """Describe rows [n, heads, width]."""
    row, head, one = rows.stride()
    if one != 1:
        raise TypeError("heads of queries, keys or values are not contiguous")
    return _Heads(_address(rows), row, head)


def attend_by_torch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    layer: Any,
    causal: bool,
    window: int,
    out: Tensor,
) -> None:
    """Attend every query token of `plan`; write to `out` in the queries' type.

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
        # Without a mask torch computes a whole causal prompt faster.
        square = causal and window < 0 and count == cached and not layer.logit_cap
        mask = None if square else plan.mask(r, causal, window, queries.dtype)
        if layer.logit_cap:
            mixed = _capped_attention(q, k, v, mask, layer.scaling, layer.logit_cap)
        else:
            mixed = scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, is_causal=square, scale=layer.scaling,
                enable_gqa=True,
            )[0]  # fmt: skip
        out[first : first + count] = mixed.transpose(0, 1)


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """Attend q [H, n, D], k [Hkv, L, D], v [Hkv, L, Dv] -> [H, n, Dv] with capped scores.

    They are cap * tanh(score / cap) before the softmax.
    """
    group = q.shape[0] // k.shape[0]
    grouped = q.reshape(k.shape[0], group * q.shape[1], q.shape[2])  # heads of a group become rows
    scores = torch.bmm(grouped, k.transpose(1, 2)) * scale
    scores = (cap * torch.tanh(scores / cap)).view(k.shape[0], group, q.shape[1], k.shape[1])
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1).view(k.shape[0], group * q.shape[1], k.shape[1])
    return torch.bmm(weights, v).view(q.shape[0], q.shape[1], v.shape[2])
