"""Attend from ragged verify windows to cached contexts and to the windows' own rows.

A verify pass has a few query rows a request and a long context. Upstream
(sglang/kernels/ops/attention/extend_attention.py, `_fwd_kernel`) gives each query head a program
with tiles of 64 or 128 rows, so that all heads of a KV group read the same keys again and most of a
tile is empty. Here one program serves all query heads of a KV head: a tile's rows are (window row,
query head) pairs, and keys are read once. If requests are few, contexts are split among
programs and a second launch merges the parts by their log-sum-exp, as in Flash-Decoding
(https://crfm.stanford.edu/2023/10/12/flashdecoding.html). A context too short for a split has one
part, which writes the output itself.

Sums are float32. Keys and values in FP8 are widened to the queries' type, as in SGLang's decode
kernel. Never run on a GPU. `attend_torch` is the reference.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.rounding import narrowed
from sglang_dspark.kernels.window_inputs import Context, Rule, Windows, check
from sglang_dspark.kernels.window_tiling import WindowTiling, device_shape, window_tiling


def attend_triton(
    windows: Windows,
    context: Context,
    rule: Rule,
    out: Tensor,
    tiling: WindowTiling | None = None,
) -> None:
    """Write the output [T, H, Dv] of all windows into `out`; rows of no window are not written.

    tiling: by default chosen by shapes and device. Reads nothing back; safe to capture. Raises
    ValueError on unsupported shapes.
    ValueError on unsupported shapes.
    """
    check(windows, context, rule, out)
    tokens, heads, size = windows.queries.shape
    kv_heads, value_size = windows.values.shape[1:]
    requests, group = len(windows.starts) - 1, heads // kv_heads
    if not tokens or not requests:
        return
    if tiling is None:
        widest = max(size, value_size)
        processors, capability = device_shape(out.device)
        tiling = window_tiling(
            requests, kv_heads, group, windows.longest, widest, processors, capability
        )
    parts: _Parts = None, None
    if tiling.splits > 1:
        rows = (tiling.splits, tokens, heads)
        parts = (
            torch.empty(*rows, value_size, dtype=torch.float32, device=out.device),
            torch.empty(rows, dtype=torch.float32, device=out.device),
        )
    _launch_windows(windows, context, rule, out, parts, tiling)
    if tiling.splits > 1:
        _launch_merge(windows, context, rule, out, parts, tiling)


_Parts = tuple[Tensor | None, Tensor | None]  # [splits, T, H, Dv] and [splits, T, H] float32


def _launch_windows(
    windows: Windows, context: Context, rule: Rule, out: Tensor, parts: _Parts, tiling: WindowTiling
) -> None:
    tokens, heads, size = windows.queries.shape
    kv_heads, value_size = windows.values.shape[1:]
    grid = len(windows.starts) - 1, kv_heads * tiling.blocks, tiling.splits
    _window_kernel[grid](
        windows.queries, windows.keys, windows.values, windows.starts,
        context.keys, context.values, context.starts, context.indices,
        rule.sinks, out, *parts,
        rule.scale, rule.scale * context.key_scale, context.value_scale, rule.logit_cap,
        *windows.queries.stride()[:2], *windows.keys.stride()[:2], *windows.values.stride()[:2],
        *context.keys.stride()[:2], *context.values.stride()[:2], *out.stride()[:2],
        tokens, heads,
        group=heads // kv_heads, longest=windows.longest, size=size, value_size=value_size,
        causal=rule.causal, sliding=rule.sliding, capped=rule.logit_cap > 0,
        has_sinks=rule.sinks is not None, splits=tiling.splits, least=tiling.least,
        block_m=tiling.rows, blocks=tiling.blocks, block_n=tiling.keys, window_n=tiling.window,
        size_block=max(16, triton.next_power_of_2(size)),
        value_block=max(16, triton.next_power_of_2(value_size)),
        interpreted=bool(triton.knobs.runtime.interpret),
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


def _launch_merge(
    windows: Windows, context: Context, rule: Rule, out: Tensor, parts: _Parts, tiling: WindowTiling
) -> None:
    tokens, heads, value_size = out.shape
    requests = len(windows.starts) - 1
    _merge_kernel[(tokens, heads)](
        *parts, windows.starts, context.starts, rule.sinks, out, *out.stride()[:2],
        tokens, heads, requests,
        longest=windows.longest, value_size=value_size, has_sinks=rule.sinks is not None,
        splits=tiling.splits, least=tiling.least, block_n=tiling.keys,
        starts_block=triton.next_power_of_2(requests + 1),
        value_block=triton.next_power_of_2(value_size),
        interpreted=bool(triton.knobs.runtime.interpret), num_warps=2,
    )  # fmt: skip


def attend_torch(windows: Windows, context: Context, rule: Rule, out: Tensor) -> None:
    """Compute the reference of `attend_triton`: same arguments, in float64, window by window."""
    check(windows, context, rule, out)
    heads, kv_heads = windows.queries.shape[1], windows.keys.shape[1]
    starts, places = windows.starts.tolist(), context.starts.tolist()
    for r, (first, end) in enumerate(pairwise(starts)):
        out[first + windows.longest : end] = 0
        end = min(end, first + windows.longest)
        slots = context.indices[places[r] : places[r + 1]].long()
        own = slice(first, end)
        cached_keys = context.keys[slots].double() * context.key_scale
        cached_values = context.values[slots].double() * context.value_scale
        keys = torch.cat((cached_keys, windows.keys[own].double()))  # [n + w, KV, D]
        values = torch.cat((cached_values, windows.values[own].double()))
        keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        scores = torch.einsum("whd,nhd->hwn", windows.queries[own].double(), keys) * rule.scale
        if rule.logit_cap > 0:
            scores = rule.logit_cap * torch.tanh(scores / rule.logit_cap)
        back = _distances(end - first, len(slots), out.device)
        if rule.causal:
            scores.masked_fill_(back < 0, -torch.inf)
        if rule.sliding >= 0:
            scores.masked_fill_(back.abs() > rule.sliding, -torch.inf)
        if rule.sinks is not None:
            sink = rule.sinks.double()[:, None, None].expand(-1, end - first, 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        out[own] = torch.einsum("hwn,nhd->whd", weights, values).to(out.dtype)


def _distances(rows: int, cached: int, device: torch.device) -> Tensor:
    """Return [w, n + w] tokens from a row back to each token; at least zero for cached ones.

    A sliding row without causal sees as far ahead as back, but only within its window.
    """
    row = torch.arange(rows, device=device)[:, None] + cached
    return row - torch.arange(cached + rows, device=device)[None]


@triton.jit  # type: ignore[untyped-decorator]
def _window_kernel(
    queries, keys, values, window_starts, cached_keys, cached_values, context_starts, indices,
    sinks, out, parts, part_sums, scale, cached_scale, value_scale, logit_cap, query_step,
    query_head, key_step, key_head, value_step, value_head, cached_key_step, cached_key_head,
    cached_value_step, cached_value_head, out_step, out_head, tokens, heads, group: tl.constexpr,
    longest: tl.constexpr, size: tl.constexpr, value_size: tl.constexpr, causal: tl.constexpr,
    sliding: tl.constexpr, capped: tl.constexpr, has_sinks: tl.constexpr, splits: tl.constexpr,
    least: tl.constexpr, block_m: tl.constexpr, blocks: tl.constexpr, block_n: tl.constexpr,
    window_n: tl.constexpr, size_block: tl.constexpr, value_block: tl.constexpr,
    interpreted: tl.constexpr,
):  # fmt: skip
    split, kv_head, block = tl.program_id(2), tl.program_id(1) // blocks, tl.program_id(1) % blocks
    first, rows = _bounds(window_starts, tl.program_id(0))
    context, length = _bounds(context_starts, tl.program_id(0))
    step, live = _parts_of(length, splits, least, block_n)
    if (rows * group <= block * block_m) | (split >= live):
        return
    if (split == 0) & (block == 0):  # a graph's padding must be finite, and costs no attention
        _clear(out, first, rows, longest, kv_head, out_step, out_head, group, value_size,
               value_block)  # fmt: skip
    pair = block * block_m + tl.arange(0, block_m)
    row, head = pair // group, kv_head * group + pair % group
    attended = tl.minimum(rows, longest)
    token = first + row
    q = _rows(queries, token * query_step + head * query_head, row < attended, size, size_block)
    acc, most, total = _over_context(
        q, row, cached_keys + kv_head * cached_key_head,
        cached_values + kv_head * cached_value_head, indices + context, cached_key_step,
        cached_value_step, split * step, tl.minimum(split * step + step, length), length,
        cached_scale, logit_cap, sliding, capped, size, value_size, block_n, size_block,
        value_block, interpreted)  # fmt: skip
    acc, most, total = _over_window(
        q, row, keys + first * key_step + kv_head * key_head,
        values + first * value_step + kv_head * value_head, key_step, value_step,
        tl.where(split == live - 1, attended, 0), scale, logit_cap, acc * value_scale, most, total,
        causal, sliding, capped, size, value_size, window_n, size_block, value_block,
        interpreted)  # fmt: skip
    _store(out, token * out_step + head * out_head, parts, part_sums,
        (split.to(tl.int64) * tokens + token) * heads + head, sinks, head, live == 1,
        row < attended, acc, most, total, value_size, splits, has_sinks, interpreted)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _rows(queries, places, real, size: tl.constexpr, size_block: tl.constexpr):
    """Load query rows [m, D] at these places; zeros where they are not real."""
    d = tl.arange(0, size_block)[None, :]
    return tl.load(queries + places[:, None] + d, mask=real[:, None] & (d < size), other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(starts, request):
    """Return the first place of a request, and its number of places."""
    first = tl.load(starts + request).to(tl.int64)
    return first, (tl.load(starts + request + 1) - first).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _over_context(
    q, row, keys, values, indices, key_step, value_step, begin, end, length, scale, logit_cap,
    sliding: tl.constexpr, capped: tl.constexpr, size: tl.constexpr, value_size: tl.constexpr,
    block_n: tl.constexpr, size_block: tl.constexpr, value_block: tl.constexpr,
    interpreted: tl.constexpr,
):  # fmt: skip
    """Compute the online softmax over cached tokens `begin` to `end`: [m, Dv], [m], [m]."""
    acc = tl.zeros([q.shape[0], value_block], dtype=tl.float32)
    most = tl.full([q.shape[0]], float("-inf"), dtype=tl.float32)
    total = tl.zeros([q.shape[0]], dtype=tl.float32)
    d, dv = tl.arange(0, size_block)[:, None], tl.arange(0, value_block)[None, :]
    for start in range(begin, end, block_n):
        n = start + tl.arange(0, block_n)
        slot = tl.load(indices + n, mask=n < end, other=0).to(tl.int64)
        inside = (n[None, :] < end) & (d < size)
        k = tl.load(keys + slot[None, :] * key_step + d, mask=inside, other=0.0)
        scores = _scores(q, k, scale, logit_cap, capped, interpreted)
        seen = n[None, :] < end
        if sliding >= 0:
            seen = seen & (length + row[:, None] - n[None, :] <= sliding)
        inside = (n[:, None] < end) & (dv < value_size)
        v = tl.load(values + slot[:, None] * value_step + dv, mask=inside, other=0.0)
        acc, most, total = _add(scores, seen, v, acc, most, total, q.dtype, interpreted)
    return acc, most, total


@triton.jit  # type: ignore[untyped-decorator]
def _over_window(
    q, row, keys, values, key_step, value_step, end, scale, logit_cap, acc, most, total,
    causal: tl.constexpr, sliding: tl.constexpr, capped: tl.constexpr, size: tl.constexpr,
    value_size: tl.constexpr, window_n: tl.constexpr, size_block: tl.constexpr,
    value_block: tl.constexpr, interpreted: tl.constexpr,
):  # fmt: skip
    """Add the window's own rows up to `end`, which only the last part has, to the same sums."""
    d, dv = tl.arange(0, size_block)[:, None], tl.arange(0, value_block)[None, :]
    for start in range(0, end, window_n):
        n = start + tl.arange(0, window_n)
        inside = (n[None, :] < end) & (d < size)
        k = tl.load(keys + n[None, :] * key_step + d, mask=inside, other=0.0)
        scores = _scores(q, k, scale, logit_cap, capped, interpreted)
        back = row[:, None] - n[None, :]
        seen = n[None, :] < end
        if causal:
            seen = seen & (back >= 0)
        if sliding >= 0:
            seen = seen & (back <= sliding) & (-back <= sliding)
        inside = (n[:, None] < end) & (dv < value_size)
        v = tl.load(values + n[:, None] * value_step + dv, mask=inside, other=0.0)
        acc, most, total = _add(scores, seen, v, acc, most, total, q.dtype, interpreted)
    return acc, most, total


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    out, places, parts, part_sums, part_rows, sinks, head, whole, real, acc, most, total,
    value_size: tl.constexpr, splits: tl.constexpr, has_sinks: tl.constexpr,
    interpreted: tl.constexpr,
):  # fmt: skip
    """Write the output of whole sums, else the means and log-sum-exp of a part."""
    dv = tl.arange(0, acc.shape[1])[None, :]
    stored = real[:, None] & (dv < value_size)
    if whole:
        if has_sinks:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
            total += tl.exp2(sink * 1.4426950408889634 - most)
        result = narrowed(acc / total[:, None], out.dtype.element_ty, interpreted)
        tl.store(out + places[:, None] + dv, result, mask=stored)
    elif splits > 1:
        # A row that sees no token of this part has no sum; its weight in the merge is zero.
        mean = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(parts + part_rows[:, None] * value_size + dv, mean, mask=stored)
        tl.store(part_sums + part_rows, most + tl.log2(total), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(
    parts, part_sums, window_starts, context_starts, sinks, out, out_step, out_head,
    tokens, heads, requests,
    longest: tl.constexpr, value_size: tl.constexpr, has_sinks: tl.constexpr,
    splits: tl.constexpr, least: tl.constexpr, block_n: tl.constexpr, starts_block: tl.constexpr,
    value_block: tl.constexpr, interpreted: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = tl.arange(0, starts_block)
    starts = tl.load(window_starts + r, mask=r <= requests, other=0)
    begun = (r <= requests) & (starts <= token)
    request = tl.sum(begun.to(tl.int32), 0) - 1  # the last to start here: earlier ones are empty
    if request >= requests:
        return
    if token - tl.load(window_starts + request) >= longest:
        return
    _, length = _bounds(context_starts, request)
    _, live = _parts_of(length, splits, least, block_n)
    if live == 1:
        return
    split, dv = tl.arange(0, splits), tl.arange(0, value_block)
    part = (split.to(tl.int64) * tokens + token) * heads + head
    sums = tl.load(part_sums + part, mask=split < live, other=float("-inf"))
    most = tl.max(sums, 0)
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        most = tl.maximum(most, sink)
    weights = tl.exp2(sums - most)
    total = tl.sum(weights, 0)
    if has_sinks:
        total += tl.exp2(sink - most)
    rows = tl.load(
        parts + part[:, None] * value_size + dv[None, :],
        mask=(split[:, None] < live) & (dv[None, :] < value_size), other=0.0,
    )  # fmt: skip
    mean = tl.sum(rows * weights[:, None], 0) / total
    result = narrowed(mean, out.dtype.element_ty, interpreted)
    tl.store(out + token * out_step + head * out_head + dv, result, mask=dv < value_size)


@triton.jit  # type: ignore[untyped-decorator]
def _parts_of(length, splits: tl.constexpr, least: tl.constexpr, block_n: tl.constexpr):
    """Return cached tokens of a part, a multiple of a step, and a context's parts, at least one."""
    step = tl.maximum((length + splits - 1) // splits, least)
    step = (step + block_n - 1) // block_n * block_n
    return step, tl.maximum((length + step - 1) // step, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _clear(
    out, first, rows, longest: tl.constexpr, kv_head, out_step, out_head, group: tl.constexpr,
    value_size: tl.constexpr, value_block: tl.constexpr,
):  # fmt: skip
    """Write zeros to the rows of a window after the `longest` first ones."""
    dv = tl.arange(0, value_block)
    zeros = tl.zeros_like(dv).to(out.dtype.element_ty)
    for row in range(longest, rows):
        for head in range(kv_head * group, kv_head * group + group):
            place = (first + row) * out_step + head * out_head
            tl.store(out + place + dv, zeros, mask=dv < value_size)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(q, k, scale, logit_cap, capped: tl.constexpr, interpreted: tl.constexpr):
    """Compute scores of q [m, D] and k [D, n] in units of log 2: exp2 is faster than exp."""
    scores = _product(q, k.to(q.dtype), interpreted) * scale
    if capped:
        scores = logit_cap * (2 * tl.sigmoid(2 * scores / logit_cap) - 1)
    return scores * 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _add(scores, seen, v, acc, most, total, dtype: tl.constexpr, interpreted: tl.constexpr):
    """Do one step of the online softmax: add the values of n more tokens [n, Dv] to the sums."""
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no token yet
    decay = tl.exp2(most - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None] + _product(
        narrowed(weights, dtype, interpreted), v.to(dtype), interpreted
    )
    return acc, higher, total


@triton.jit  # type: ignore[untyped-decorator]
def _product(a, b, interpreted: tl.constexpr):
    """Multiply with float32 sums; the interpreter would multiply the bits of BF16."""
    if interpreted:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")
