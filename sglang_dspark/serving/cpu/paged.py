"""Attention over a paged float32 cache for few query tokens, read in place (Numba).

softmax(q k^T scale) v for windows of up to some dozens of tokens: decode, verify and draft blocks.
torch would first gather every request's K and V into one padded tensor; this kernel walks the slot
table instead, serves all query heads of a group from one read of K and V, and knows no padding.
Sliding window: position p sees p - window .. p, as in sglang's `sliding_window_size`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from sglang_dspark.serving.cpu.jit import exp32, kernel, parallel_kernel

_NONE = np.float32(-np.inf)
NO_WINDOW = -1


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

    queries [n, d], scores [n, len(slots)].
    """
    last = queries.shape[0] - 1
    for block in range(0, queries.shape[0], 4):
        r1, r2, r3 = min(block + 1, last), min(block + 2, last), min(block + 3, last)
        q0, q1, q2, q3 = queries[block], queries[r1], queries[r2], queries[r3]
        for j in range(slots.shape[0]):
            key = keys[slots[j], head]
            a0 = a1 = a2 = a3 = np.float32(0.0)
            for d in range(key.shape[0]):
                k = key[d]
                a0 += k * q0[d]
                a1 += k * q1[d]
                a2 += k * q2[d]
                a3 += k * q3[d]
            scores[block, j] = a0 * scale
            scores[r1, j] = a1 * scale
            scores[r2, j] = a2 * scale
            scores[r3, j] = a3 * scale


@kernel
def _exp_row(row):  # type: ignore[no-untyped-def]
    """Turn scores into softmax numerators in place and return their sum.

    Invisible positions (-inf) get about 1e-38 of the largest weight, which float32 sums drop.
    """
    top = _NONE
    for j in range(row.shape[0]):
        top = max(top, row[j])
    total = np.float32(0.0)
    for j in range(row.shape[0]):
        weight = exp32(row[j] - top)
        row[j] = weight
        total += weight
    return total


@kernel
def _mix_rows(weights, values, head, slots, out):  # type: ignore[no-untyped-def]
    """out[i] = sum_j weights[i, j] * values[slots[j], head]; four slots share one pass over out.

    weights [n, len(slots)], out [n, d], overwritten.
    """
    out[:] = np.float32(0.0)
    count = slots.shape[0]
    for j in range(0, count - 3, 4):
        v0, v1 = values[slots[j], head], values[slots[j + 1], head]
        v2, v3 = values[slots[j + 2], head], values[slots[j + 3], head]
        for i in range(out.shape[0]):
            w0, w1, w2, w3 = weights[i, j], weights[i, j + 1], weights[i, j + 2], weights[i, j + 3]
            row = out[i]
            for d in range(row.shape[0]):
                row[d] += (w0 * v0[d] + w1 * v1[d]) + (w2 * v2[d] + w3 * v3[d])
    for j in range(count - count % 4, count):
        value = values[slots[j], head]
        for i in range(out.shape[0]):
            w = weights[i, j]
            row = out[i]
            for d in range(row.shape[0]):
                row[d] += w * value[d]


@kernel
def _hide(scores, group, kv_len, query_len, start, causal, window, tree):  # type: ignore[no-untyped-def]
    """Set scores of invisible positions to -inf; column j stands for position start + j.

    tree: [n, n] for the last n positions, or empty for a chain.
    """
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
def _attend_head(
    q,
    k_cache,
    v_cache,
    slots,
    first,
    query_len,
    kv_len,
    start,
    kv_head,
    scale,
    causal,
    window,
    tree,
    out,
):  # type: ignore[no-untyped-def]
    """One request and one KV head: every query row of the head's group."""
    group = q.shape[1] // k_cache.shape[1]
    head = kv_head * group
    rows = query_len * group
    queries = np.empty((rows, q.shape[2]), np.float32)
    for i in range(query_len):
        for g in range(group):
            queries[i * group + g] = q[first + i, head + g]
    scores = np.empty((rows, slots.shape[0]), np.float32)
    totals = np.empty(rows, np.float32)
    _score_rows(queries, k_cache, kv_head, slots, scale, scores)
    _hide(scores, group, kv_len, query_len, start, causal, window, tree)
    for row in range(rows):
        totals[row] = _exp_row(scores[row])
    mixed = np.empty((rows, v_cache.shape[2]), np.float32)
    _mix_rows(scores, v_cache, kv_head, slots, mixed)
    for i in range(query_len):
        for g in range(group):
            share = np.float32(1.0) / totals[i * group + g]
            for d in range(mixed.shape[1]):
                out[first + i, head + g, d] = mixed[i * group + g, d] * share


def _attend(
    q,
    k_cache,
    v_cache,
    table,
    req_rows,
    query_start,
    query_lens,
    kv_lens,
    scale,
    causal,
    window,
    trees,
    out,
):  # type: ignore[no-untyped-def]
    kv_heads = k_cache.shape[1]
    for item in prange(req_rows.shape[0] * kv_heads):
        r = item // kv_heads
        query_len, kv_len = query_lens[r], kv_lens[r]
        if query_len > 0:
            start = max(kv_len - query_len - window, 0) if window >= 0 else 0
            slots = table[req_rows[r], start:kv_len].astype(np.int64)
            tree = trees[r] if trees.shape[0] > 0 else np.empty((0, 0), np.bool_)
            _attend_head(
                q, k_cache, v_cache, slots, query_start[r], query_len, kv_len, start,
                item % kv_heads, scale, causal, window, tree, out,
            )  # fmt: skip


_attend_serial = kernel(_attend)
_attend_parallel = parallel_kernel(_attend)
_NO_TREES = np.empty((0, 0, 0), np.bool_)


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    plan: Any,
    *,
    scale: float,
    causal: bool,
    window: int,
    threads: int,
    out: Any,
) -> None:
    """Attend every query token of `plan` to its request's cached tokens.

    q: [T, H, D] float32. k_cache: [S, Hkv, D], v_cache: [S, Hkv, Dv] float32; H a multiple of Hkv.
    plan: `AttentionPlan`. window: tokens behind a position that it sees, NO_WINDOW for all.
    out: [T, H, Dv] float32, written for the plan's tokens. All are numpy arrays.
    """
    run = _attend_parallel if threads > 1 else _attend_serial
    trees = _NO_TREES if plan.tree is None else plan.tree
    run(
        q, k_cache, v_cache, plan.table, plan.req_rows, plan.query_start, plan.query_lens,
        plan.kv_lens, np.float32(scale), causal, window, trees, out,
    )  # fmt: skip
