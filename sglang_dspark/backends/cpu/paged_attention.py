"""Attend over a paged cache in place: float32 by a Numba kernel, everything else by torch.

softmax(q k^T scale) v for windows of any length: decode, verify, draft blocks and prefills. torch
would first gather every request's K and V into one padded tensor; this kernel reads the slot table
instead, computes all query heads of a group from one read of K and V, and pads nothing.
Sliding window: position p sees p - window .. p, as in sglang's `sliding_window_size`.

A query's result is bitwise the same in every window, batch and thread count: hidden positions weigh
exactly 0, and sums run over groups of positions that start at multiples of `TILE`, in the order of
lanes.py. So the attention of plain decoding and of verification agrees exactly, and so does that of
prompts in one batch, in several, or with a cached prefix.

`attend_by_torch` computes half-precision caches and capped scores by scaled_dot_product_attention:
one product per request, as prefill lengths differ and the matrix work dominates at these sizes. K
and V are read as a view where the request's slots are consecutive, as those of new prefills are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import boolean, float32, int32, int64, types, void
from torch import Tensor

from sglang_dspark.backends.cpu.attention_plan import CACHED, FIRST, QUERIES, ROW, AttentionPlan
from sglang_dspark.backends.cpu.jit import in_parts, kernel
from sglang_dspark.backends.cpu.lanes import add_weighted, dots, lane_max, lane_sum
from sglang_dspark.float_ops import exp32

NO_WINDOW = -1
# Softmax rows are padded to a multiple of this: no processor's vector loop steps further at once.
TILE = 64

TOGETHER = 32  # queries of a long window in one block, so that their scores stay in the cache
_NONE = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_WORK_PER_THREAD = 1 << 16  # multiplications, some microseconds
_NEGLIGIBLE = np.float32(-87.0)  # exp of less is below float32's normal range


@kernel
def store_rows(cache, slots, rows):  # type: ignore[no-untyped-def]
    """cache[slots[i]] = rows[i]; cache [S, h, d], slots [n], rows [n, h, d]."""
    for i in range(slots.shape[0]):
        slot = slots[i]
        for h in range(rows.shape[1]):
            for d in range(rows.shape[2]):
                cache[slot, h, d] = rows[i, h, d]


@kernel
def _score_rows(queries, keys, head, slots, scale, scores):  # type: ignore[no-untyped-def]
    """scores[i, j] = scale * queries[i] . keys[slots[j], head]; four rows share one read of a key.

    queries [n, d], scores [n, at least len(slots)].
    """
    last, end = queries.shape[0] - 1, slots.shape[0] - 1
    for block in range(0, queries.shape[0], 4):
        r1, r2, r3 = min(block + 1, last), min(block + 2, last), min(block + 3, last)
        q = queries[block], queries[r1], queries[r2], queries[r3]
        for j in range(0, slots.shape[0], 4):
            k0, k1 = keys[slots[j], head], keys[slots[min(j + 1, end)], head]
            k2, k3 = keys[slots[min(j + 2, end)], head], keys[slots[min(j + 3, end)], head]
            found = dots((k0, k1, k2, k3), q)
            for k in range(4):
                scores[block, j + k] = found[k] * scale
                scores[r1, j + k] = found[4 + k] * scale
                scores[r2, j + k] = found[8 + k] * scale
                scores[r3, j + k] = found[12 + k] * scale


@kernel
def _exp_row(row):  # type: ignore[no-untyped-def]
    """Turn scores into softmax numerators in place and return their sum.

    row: a multiple of TILE long. -inf gives exactly 0, so hidden positions change no sum.
    """
    top = lane_max(row)
    for j in range(row.shape[0]):
        gap = row[j] - top
        weight = exp32(gap)
        if gap < _NEGLIGIBLE:
            weight = _ZERO
        row[j] = weight
    return lane_sum(row)


@kernel
def _four(weights, i, j):  # type: ignore[no-untyped-def]
    return weights[i, j], weights[i, j + 1], weights[i, j + 2], weights[i, j + 3]


@kernel
def _mix_rows(weights, values, head, slots, out):  # type: ignore[no-untyped-def]
    """out[i] = sum_j weights[i, j] * values[slots[j], head]; four slots share one pass over out.

    weights [n, a multiple of 4], 0 beyond len(slots). out [n, d], overwritten.
    """
    out[:] = _ZERO
    last = slots.shape[0] - 1
    for j in range(0, slots.shape[0], 4):
        v0, v1 = values[slots[j], head], values[slots[min(j + 1, last)], head]
        v2, v3 = values[slots[min(j + 2, last)], head], values[slots[min(j + 3, last)], head]
        v = v0, v1, v2, v3
        whole = out.shape[0] // 4 * 4
        for i in range(0, whole, 4):
            rows = out[i], out[i + 1], out[i + 2], out[i + 3]
            a, b = _four(weights, i, j), _four(weights, i + 1, j)
            add_weighted(rows, (a, b, _four(weights, i + 2, j), _four(weights, i + 3, j)), v)
        for i in range(whole, out.shape[0]):
            add_weighted((out[i],), (_four(weights, i, j),), v)


@kernel
def _hide(scores, group, request, start, causal, window, tree):  # type: ignore[no-untyped-def]
    """Set scores of invisible positions to -inf; column j stands for position start + j.

    tree: [n, n] for the last n positions, or empty for a chain.
    """
    query_len, kv_len = request[QUERIES], request[CACHED]
    for i in range(query_len):
        position = kv_len - query_len + i
        low = max(position - window, start) if window >= 0 else start
        high = position + 1 if causal and tree.shape[0] == 0 else kv_len
        for row in range(i * group, (i + 1) * group):
            scores[row, : low - start] = _NONE
            scores[row, high - start :] = _NONE
            for j in range(tree.shape[0]):
                if not tree[i, j]:
                    scores[row, kv_len - query_len + j - start] = _NONE


@kernel
def _attend_head(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, slots, request, start, kv_head, scale, causal, window, tree, out
):
    """Attend every query row of a KV head's group for one request."""
    group = q.shape[1] // k_cache.shape[1]
    head, first, query_len = kv_head * group, request[FIRST], request[QUERIES]
    rows = query_len * group
    queries = np.empty((rows, q.shape[2]), np.float32)
    for i in range(query_len):
        for g in range(group):
            queries[i * group + g] = q[first + i, head + g]
    scores = np.empty((rows, (slots.shape[0] + TILE - 1) // TILE * TILE), np.float32)
    totals = np.empty(rows, np.float32)
    _score_rows(queries, k_cache, kv_head, slots, scale, scores)
    _hide(scores, group, request, start, causal, window, tree)
    for row in range(rows):
        totals[row] = _exp_row(scores[row])
    mixed = np.empty((rows, v_cache.shape[2]), np.float32)
    _mix_rows(scores, v_cache, kv_head, slots, mixed)
    for i in range(query_len):
        for g in range(group):
            share = np.float32(1.0) / totals[i * group + g]
            for d in range(mixed.shape[1]):
                out[first + i, head + g, d] = mixed[i * group + g, d] * share


@kernel
def _blocks(requests, trees, causal, window):  # type: ignore[no-untyped-def]
    """Count the blocks of the longest window.

    1 where a query's place in the window matters: in trees, and in bidirectional windows."""
    longest = 1
    if trees.shape[0] == 0 and (causal or window < 0):
        for r in range(requests.shape[0]):
            longest = max(longest, requests[r, QUERIES])
        return (longest + TOGETHER - 1) // TOGETHER
    return longest


@kernel
def _block_of(request, block, blocks, causal):  # type: ignore[no-untyped-def]
    """Return a block of a request's queries as a request of its own; it may be empty."""
    queries, cached = request[QUERIES], request[CACHED]
    if blocks == 1:
        return request[ROW], request[FIRST], queries, cached
    done = min(block * TOGETHER, queries)
    count = min(TOGETHER, queries - done)
    seen = cached - queries + done + count if causal else cached
    return request[ROW], request[FIRST] + done, count, seen


@kernel
def _attend_item(  # type: ignore[no-untyped-def]
    item, blocks, q, k_cache, v_cache, table, requests, trees, scale, causal, window, out
):
    """Attend one block of queries and one KV head, numbered by request, then by head."""
    heads = k_cache.shape[1]
    r, kv_head = item // (heads * blocks), item // blocks % heads
    block = _block_of(requests[r], item % blocks, blocks, causal)
    if block[QUERIES] > 0:
        start = 0
        if window >= 0:
            start = max(block[CACHED] - block[QUERIES] - window, 0) // TILE * TILE
        slots = table[block[ROW], start : block[CACHED]].astype(np.int64)
        tree = trees[r] if trees.shape[0] > 0 else np.empty((0, 0), np.bool_)
        _attend_head(
            q, k_cache, v_cache, slots, block, start, kv_head, scale, causal, window, tree, out
        )


@kernel
def _attend_items(  # type: ignore[no-untyped-def]
    first, end, blocks, q, k_cache, v_cache, table, requests, trees, scale, causal, window, out
):
    for item in range(first, end):
        _attend_item(
            item, blocks, q, k_cache, v_cache, table, requests, trees, scale, causal, window, out
        )


@kernel
def _threads_for(threads, q, k_cache, v_cache, requests, items):  # type: ignore[no-untyped-def]
    """Limit the threads where they would wait longer than they compute."""
    seen = 0
    for r in range(requests.shape[0]):
        seen += requests[r, QUERIES] * requests[r, CACHED]
    work = seen * q.shape[1] * (k_cache.shape[2] + v_cache.shape[2])
    return min(threads, work // _WORK_PER_THREAD, items)


@kernel
def attend(  # type: ignore[no-untyped-def]
    sharing, q, k_cache, v_cache, k_rows, v_rows, row_slots, table, requests, trees, scale, causal,
    window, out,
):  # fmt: skip
    """Compute `paged_attention` of arrays; sharing: of `threads.sharing`."""
    store_rows(k_cache, row_slots, k_rows)
    store_rows(v_cache, row_slots, v_rows)
    blocks = _blocks(requests, trees, causal, window)
    given = (blocks, q, k_cache, v_cache, table, requests, trees, scale, causal, window, out)
    items = requests.shape[0] * k_cache.shape[1] * blocks
    threads = _threads_for(sharing[1], q, k_cache, v_cache, requests, items)
    if threads < 2:
        _attend_items(0, items, *given)
    elif not in_parts(sharing[0], threads, _attend_items, items, given):
        raise MemoryError("attention: a thread had no memory for its scores")


@cache
def compiled() -> Any:
    """Compile the kernel for exactly the types it serves, before any request waits."""
    rows, pool = types.Array(float32, 3, "A"), float32[:, :, ::1]
    attend.compile(
        void(
            types.UniTuple(int64, 2), rows, pool, pool, rows, rows, int64[::1], int32[:, ::1],
            int64[:, ::1], boolean[:, :, ::1], float32, boolean, int64, pool,
        )
    )  # fmt: skip
    attend.disable_compile()
    return attend


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    causal: bool,
    window: int,
    sharing: tuple[int, int],
    out: Tensor,
    new: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Write the pass's own K and V, if given, then attend every query token of `plan`.

    q: [T, H, D]. k_cache: [S, Hkv, D], v_cache: [S, Hkv, Dv], contiguous; H a multiple of Hkv.
    window: tokens behind a position that it sees, NO_WINDOW for all. sharing: the pool's entry and
    threads, of `threads.sharing`. out: [T, H, Dv], written for
    the plan's tokens. new: (k [n, Hkv, D], v [n, Hkv, Dv], cache slots [n] int64). All float32.
    Raises TypeError for other types or strides.
    """
    q_array = q.numpy()
    if new is None:
        k_rows = v_rows = q_array[:0]
        row_slots = _NO_SLOTS
    else:
        k_rows, v_rows, row_slots = new[0].numpy(), new[1].numpy(), new[2].numpy()
    compiled()(
        sharing, q_array, k_cache.numpy(), v_cache.numpy(), k_rows, v_rows, row_slots, plan.table,
        plan.requests, plan.trees, scale, causal, window, out.numpy(),
    )  # fmt: skip


_NO_SLOTS = np.empty(0, np.int64)


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
            mixed = _capped_attention(q, k, v, mask, layer.scaling, layer.logit_cap)
        else:
            mask = None if square else plan.mask(r, causal, window, queries.dtype)
            mixed = _sdpa(q, k, v, mask, square, layer.scaling)
        out[first : first + count] = mixed.transpose(0, 1)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, square: bool, scale: float
) -> Tensor:
    """Attend q [H, n, D], k [Hkv, L, D], v [Hkv, L, Dv] -> [H, n, Dv]; square: causal, n == L."""
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=square, scale=scale, enable_gqa=True
    )
    return mixed[0]


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """Compute `_sdpa` with scores capped to cap * tanh(score / cap) before the softmax."""
    group = q.shape[0] // k.shape[0]
    grouped = q.reshape(k.shape[0], group * q.shape[1], q.shape[2])  # heads of a group are rows
    scores = torch.bmm(grouped, k.transpose(1, 2)) * scale
    scores = (cap * torch.tanh(scores / cap)).view(k.shape[0], group, q.shape[1], k.shape[1])
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1).view(k.shape[0], group * q.shape[1], k.shape[1])
    return torch.bmm(weights, v).view(q.shape[0], q.shape[1], v.shape[2])
