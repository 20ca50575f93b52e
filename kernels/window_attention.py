"""Attend from ragged verify windows to cached contexts and to the windows' own rows.

A verify pass has a few query rows a request and a long context. Upstream
(sglang/kernels/ops/attention/extend_attention.py, `_fwd_kernel`) gives each query head a program
with tiles of 64 or 128 rows, so that all heads of a KV group read the same keys again and most of a
tile is empty. Here one program serves all query heads of a KV head: a tile's rows are (window row,
query head) pairs, and keys are read once. Where requests are few, contexts are split among
programs and a second launch merges the parts by their log-sum-exp, as Flash-Decoding does
(https://crfm.stanford.edu/2023/10/12/flashdecoding.html). A context too short for a split has one
part, which writes the output itself.

Sums are float32. Keys and values in FP8 are widened to the queries' type, as SGLang's decode kernel
does it. Never run on a GPU. `attend_torch` is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.rounding import narrowed
from sglang_dspark.kernels.window_tiling import WindowTiling, device_shape, window_tiling

MOST_SIZE = 256  # of a head
TYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHES = (*TYPES, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Windows:
    """T query rows of R windows, end to end, and the keys and values of the same tokens.

    queries: [T, H, D]. keys: [T, KV, D]. values: [T, KV, Dv]. starts: [R + 1] integers on the
    device; a window may have no row. longest: rows that a window attends with at most, known on the
    host. Later rows are padding of a graph and become zero.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    starts: Tensor
    longest: int


@dataclass(frozen=True)
class Context:
    """Cached tokens before each window.

    keys: [slots, KV, D]. values: [slots, KV, Dv]. starts: [R + 1] integers into indices. indices:
    [n] integers, the slots of each request's tokens in order. key_scale, value_scale: what cached
    numbers are multiplied by.
    """

    keys: Tensor
    values: Tensor
    starts: Tensor
    indices: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


@dataclass(frozen=True)
class Rule:
    """Decide what a row sees and how scores become weights.

    scale: of the product of query and key. causal: a row sees the window up to itself, else all of
    it. sliding: tokens back that a row sees, -1: all; without causal also ahead. logit_cap: c of
    c tanh(score / c), 0: none. sinks: [H], a score of each head that has no value.
    """

    scale: float
    causal: bool = True
    sliding: int = -1
    logit_cap: float = 0.0
    sinks: Tensor | None = None


def why_not(windows: Windows, context: Context) -> str | None:
    """Return why `attend_triton` does not support these tensors; None: it does."""
    size, value_size = windows.queries.shape[-1], windows.values.shape[-1]
    if max(size, value_size) > MOST_SIZE:
        return f"heads of {max(size, value_size)} numbers, more than {MOST_SIZE}"
    dtype = windows.queries.dtype
    if dtype not in TYPES or windows.keys.dtype != dtype or windows.values.dtype != dtype:
        return f"rows of {dtype}, {windows.keys.dtype} and {windows.values.dtype}"
    cached = context.keys.dtype
    if cached not in CACHES or context.values.dtype != cached:
        return f"a cache of {cached} and {context.values.dtype}"
    capability = device_shape(windows.queries.device)[1]
    if cached is torch.float8_e4m3fn and capability is not None and capability < (8, 9):
        return "this device does not convert from FP8 (E4M3)"
    for each in (context.keys, context.values):
        if each.dim() != 3:
            return f"a cache of {each.dim()} dimensions"
    return None


def attend_triton(
    windows: Windows,
    context: Context,
    rule: Rule,
    out: Tensor,
    tiling: WindowTiling | None = None,
) -> None:
    """Write the output [T, H, Dv] of all windows into `out`; rows of no window are not written.

    tiling: chosen by shapes and device unless given. Reads nothing back; safe to capture. Raises
    ValueError on unsupported shapes.
    """
    _check(windows, context, rule, out)
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
    interpreted = bool(triton.knobs.runtime.interpret)
    parts = None, None
    if tiling.splits > 1:
        rows = (tiling.splits, tokens, heads)
        parts = (
            torch.empty(*rows, value_size, dtype=torch.float32, device=out.device),
            torch.empty(rows, dtype=torch.float32, device=out.device),
        )
    _window_kernel[(requests, kv_heads * tiling.blocks, tiling.splits)](
        windows.queries, windows.keys, windows.values, windows.starts,
        context.keys, context.values, context.starts, context.indices,
        rule.sinks, out, *parts,
        rule.scale, rule.scale * context.key_scale, context.value_scale, rule.logit_cap,
        *windows.queries.stride()[:2], *windows.keys.stride()[:2], *windows.values.stride()[:2],
        *context.keys.stride()[:2], *context.values.stride()[:2], *out.stride()[:2],
        tokens, heads,
        group=group, longest=windows.longest, size=size, value_size=value_size,
        causal=rule.causal, sliding=rule.sliding, capped=rule.logit_cap > 0,
        has_sinks=rule.sinks is not None, splits=tiling.splits, least=tiling.least,
        block_m=tiling.rows, blocks=tiling.blocks, block_n=tiling.keys, window_n=tiling.window,
        size_block=max(16, triton.next_power_of_2(size)),
        value_block=max(16, triton.next_power_of_2(value_size)),
        interpreted=interpreted, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if tiling.splits > 1:
        _merge_kernel[(tokens, heads)](
            *parts, windows.starts, context.starts, rule.sinks, out, *out.stride()[:2],
            tokens, heads, requests,
            longest=windows.longest, value_size=value_size, has_sinks=rule.sinks is not None,
            splits=tiling.splits, least=tiling.least, block_n=tiling.keys,
            starts_block=triton.next_power_of_2(requests + 1),
            value_block=triton.next_power_of_2(value_size),
            interpreted=interpreted, num_warps=2,
        )  # fmt: skip


def attend_torch(windows: Windows, context: Context, rule: Rule, out: Tensor) -> None:
    """The reference of `attend_triton`; same arguments, in float64, one window at a time."""
    _check(windows, context, rule, out)
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
    """[w, n + w] tokens from a row back to each token; of cached ones at least zero.

    A row without causal that slides sees as far ahead as back, but only within its window.
    """
    row = torch.arange(rows, device=device)[:, None] + cached
    return row - torch.arange(cached + rows, device=device)[None]


def _check(windows: Windows, context: Context, rule: Rule, out: Tensor) -> None:
    tokens, heads, size = windows.queries.shape
    kv_heads, value_size = windows.values.shape[1:]
    if heads % kv_heads or windows.keys.shape != (tokens, kv_heads, size):
        raise ValueError(
            f"{heads} query heads need keys [{tokens}, KV, {size}], KV a divisor: "
            f"{tuple(windows.keys.shape)}"
        )
    if out.shape != (tokens, heads, value_size):
        raise ValueError(f"out must be [{tokens}, {heads}, {value_size}]: {tuple(out.shape)}")
    caches = context.keys.shape[1:], context.values.shape[1:]
    if caches != ((kv_heads, size), (kv_heads, value_size)):
        raise ValueError(f"the cache's rows are {caches} for {kv_heads} heads of {size}")
    if len(windows.starts) != len(context.starts) or windows.longest < 1:
        raise ValueError(
            f"{len(windows.starts)} starts of windows of at most {windows.longest} rows, "
            f"{len(context.starts)} of contexts"
        )
    if rule.sinks is not None and rule.sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}]: {tuple(rule.sinks.shape)}")
    rows = (windows.queries, windows.keys, windows.values, context.keys, context.values, out)
    if any(each.stride(-1) != 1 for each in rows):
        raise ValueError("the numbers of a head must be contiguous")
    if why := why_not(windows, context):
        raise ValueError(why)


@triton.jit  # type: ignore[untyped-decorator]
def _window_kernel(
    queries, keys, values, window_starts, cached_keys, cached_values, context_starts, indices,
    sinks, out, parts, part_sums,
    scale, cached_scale, value_scale, logit_cap,
    query_step, query_head, key_step, key_head, value_step, value_head,
    cached_key_step, cached_key_head, cached_value_step, cached_value_head, out_step, out_head,
    tokens, heads,
    group: tl.constexpr, longest: tl.constexpr, size: tl.constexpr, value_size: tl.constexpr,
    causal: tl.constexpr, sliding: tl.constexpr, capped: tl.constexpr, has_sinks: tl.constexpr,
    splits: tl.constexpr, least: tl.constexpr, block_m: tl.constexpr, blocks: tl.constexpr,
    block_n: tl.constexpr, window_n: tl.constexpr, size_block: tl.constexpr,
    value_block: tl.constexpr, interpreted: tl.constexpr,
):  # fmt: skip
    request, split = tl.program_id(0), tl.program_id(2)
    kv_head, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    first = tl.load(window_starts + request).to(tl.int64)
    rows = (tl.load(window_starts + request + 1) - first).to(tl.int32)
    context = tl.load(context_starts + request).to(tl.int64)
    length = (tl.load(context_starts + request + 1) - context).to(tl.int32)
    step, live = _parts_of(length, splits, least, block_n)
    if (rows * group <= block * block_m) | (split >= live):
        return
    dv = tl.arange(0, value_block)
    if (split == 0) & (block == 0):  # a graph's padding must be finite, and costs no attention
        _clear(out, first, rows, longest, kv_head, out_step, out_head, group, value_size, dv)
    pair = block * block_m + tl.arange(0, block_m)
    row, head = pair // group, kv_head * group + pair % group
    attended = tl.minimum(rows, longest)
    real = row < attended
    d = tl.arange(0, size_block)
    place = (first + row) * query_step + head * query_head
    q = tl.load(
        queries + place[:, None] + d[None, :],
        mask=real[:, None] & (d[None, :] < size), other=0.0,
    )  # fmt: skip
    acc = tl.zeros([block_m, value_block], dtype=tl.float32)
    most = tl.full([block_m], float("-inf"), dtype=tl.float32)
    total = tl.zeros([block_m], dtype=tl.float32)
    cached_keys += kv_head * cached_key_head
    cached_values += kv_head * cached_value_head
    end = tl.minimum(split * step + step, length)
    for begin in range(split * step, end, block_n):
        n = begin + tl.arange(0, block_n)
        slot = tl.load(indices + context + n, mask=n < end, other=0).to(tl.int64)
        k = tl.load(
            cached_keys + slot[None, :] * cached_key_step + d[:, None],
            mask=(n[None, :] < end) & (d[:, None] < size), other=0.0,
        )  # fmt: skip
        scores = _scores(q, k, cached_scale, logit_cap, capped, interpreted)
        seen = n[None, :] < end
        if sliding >= 0:
            seen = seen & (length + row[:, None] - n[None, :] <= sliding)
        v = tl.load(
            cached_values + slot[:, None] * cached_value_step + dv[None, :],
            mask=(n[:, None] < end) & (dv[None, :] < value_size), other=0.0,
        )  # fmt: skip
        acc, most, total = _add(scores, seen, v, acc, most, total, q.dtype, interpreted)
    acc *= value_scale
    keys += first * key_step + kv_head * key_head
    values += first * value_step + kv_head * value_head
    own_end = tl.where(split == live - 1, attended, 0)  # the last part has the window's own keys
    for begin in range(0, own_end, window_n):
        n = begin + tl.arange(0, window_n)
        k = tl.load(
            keys + n[None, :] * key_step + d[:, None],
            mask=(n[None, :] < own_end) & (d[:, None] < size), other=0.0,
        )  # fmt: skip
        scores = _scores(q, k, scale, logit_cap, capped, interpreted)
        seen = n[None, :] < own_end
        if causal:
            seen = seen & (n[None, :] <= row[:, None])
        if sliding >= 0:
            seen = seen & (row[:, None] - n[None, :] <= sliding)
            if not causal:
                seen = seen & (n[None, :] - row[:, None] <= sliding)
        v = tl.load(
            values + n[:, None] * value_step + dv[None, :],
            mask=(n[:, None] < own_end) & (dv[None, :] < value_size), other=0.0,
        )  # fmt: skip
        acc, most, total = _add(scores, seen, v, acc, most, total, q.dtype, interpreted)
    stored = real[:, None] & (dv[None, :] < value_size)
    if live == 1:
        if has_sinks:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
            total += tl.exp2(sink * 1.4426950408889634 - most)
        result = narrowed(acc / total[:, None], out.dtype.element_ty, interpreted)
        place = (first + row) * out_step + head * out_head
        tl.store(out + place[:, None] + dv[None, :], result, mask=stored)
    elif splits > 1:
        part = (split.to(tl.int64) * tokens + first + row) * heads + head
        # A row that sees nothing of this part has no sum; its weight in the merge is zero.
        mean = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(parts + part[:, None] * value_size + dv[None, :], mean, mask=stored)
        tl.store(part_sums + part, most + tl.log2(total), mask=real)


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
    request = tl.sum(begun.to(tl.int32), 0) - 1  # the last to begin: earlier ones there are empty
    if request >= requests:
        return
    if token - tl.load(window_starts + request) >= longest:
        return
    length = (tl.load(context_starts + request + 1) - tl.load(context_starts + request)).to(
        tl.int32
    )
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
    """Cached tokens of a part, a multiple of a step; how many parts a context has, at least one."""
    step = tl.maximum((length + splits - 1) // splits, least)
    step = (step + block_n - 1) // block_n * block_n
    return step, tl.maximum((length + step - 1) // step, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _clear(
    out, first, rows, longest: tl.constexpr, kv_head, out_step, out_head, group: tl.constexpr,
    value_size: tl.constexpr, dv,
):  # fmt: skip
    """Write zeros to the rows of a window behind the `longest` first ones."""
    zeros = tl.zeros_like(dv).to(out.dtype.element_ty)
    for row in range(longest, rows):
        for head in range(kv_head * group, kv_head * group + group):
            place = (first + row) * out_step + head * out_head
            tl.store(out + place + dv, zeros, mask=dv < value_size)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(q, k, scale, logit_cap, capped: tl.constexpr, interpreted: tl.constexpr):
    """Scores of q [m, D] and k [D, n] in units of log 2: exp2 is one instruction, exp is two."""
    scores = _product(q, k.to(q.dtype), interpreted) * scale
    if capped:
        scores = logit_cap * (2 * tl.sigmoid(2 * scores / logit_cap) - 1)
    return scores * 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _add(scores, seen, v, acc, most, total, dtype: tl.constexpr, interpreted: tl.constexpr):
    """One step of the online softmax: sums with the values of n more tokens [n, Dv]."""
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    decay = tl.exp2(most - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None] + _product(
        narrowed(weights, dtype, interpreted), v.to(dtype), interpreted
    )
    return acc, higher, total


@triton.jit  # type: ignore[untyped-decorator]
def _product(a, b, interpreted: tl.constexpr):
    """A product with float32 sums; the interpreter multiplies the bits of BF16."""
    if interpreted:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")
