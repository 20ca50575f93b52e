"""Describe a verify pass's attention: windows, cached contexts, and visible tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.kernels.window_tiling import device_shape

MOST_SIZE = 256  # of a head
TYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHES = (*TYPES, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Windows:
    """T query rows of R windows, end to end, and the keys and values of the same tokens.

    queries: [T, H, D]. keys: [T, KV, D]. values: [T, KV, Dv]. starts: [R + 1] integers on the
    device; a window may have no row. longest: most rows that a window attends with, known on the
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
    [n] integers, the slots of each request's tokens in order. key_scale, value_scale: factors of
    cached numbers.
    """

    keys: Tensor
    values: Tensor
    starts: Tensor
    indices: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


@dataclass(frozen=True)
class Rule:
    """Define which tokens a row sees and how scores become weights.

    scale: of the product of query and key. causal: a row sees the window up to itself, else all of
    it. sliding: tokens back that a row sees, -1: all; without causal also ahead. logit_cap: c of
    c tanh(score / c), 0: none. sinks: [H], a score of each head without a value.
    """

    scale: float
    causal: bool = True
    sliding: int = -1
    logit_cap: float = 0.0
    sinks: Tensor | None = None


def why_not(windows: Windows, context: Context) -> str | None:
    """Return the reason why `attend_triton` does not support these tensors; None if it does."""
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
    kv_heads = windows.keys.shape[-2]
    for width, each in ((size, context.keys), (value_size, context.values)):
        if each.dim() != 3 or each.shape[1:] != (kv_heads, width) or each.stride(-1) != 1:
            return f"a cache {list(each.shape)} of {kv_heads} heads of {width}"
    return None


def check(windows: Windows, context: Context, rule: Rule, out: Tensor) -> None:
    """Raise ValueError, with the actual value, unless `attend_triton` supports the arguments."""
    tokens, heads, size = windows.queries.shape
    kv_heads, value_size = windows.values.shape[1:]
    if heads % kv_heads or windows.keys.shape != (tokens, kv_heads, size):
        raise ValueError(
            f"{heads} query heads need keys [{tokens}, KV, {size}], KV a divisor: "
            f"{tuple(windows.keys.shape)}"
        )
    if out.shape != (tokens, heads, value_size):
        raise ValueError(f"out must be [{tokens}, {heads}, {value_size}]: {tuple(out.shape)}")
    if len(windows.starts) != len(context.starts) or windows.longest < 1:
        raise ValueError(
            f"{len(windows.starts)} starts of windows of at most {windows.longest} rows, "
            f"{len(context.starts)} of contexts"
        )
    if rule.sinks is not None and rule.sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}]: {tuple(rule.sinks.shape)}")
    rows = (windows.queries, windows.keys, windows.values, out)
    if any(each.stride(-1) != 1 for each in rows):
        raise ValueError("the numbers of a head must be contiguous")
    if why := why_not(windows, context):
        raise ValueError(why)
