"""Route tokens to experts and back on the device.

Sort (token, choice) pairs by expert, and sum the experts' outputs by token.

The sort is stable and one launch: a program for each expert reads all pairs, counts those of lower
experts, which gives its own start, and writes its own pairs in order. The sum adds the
choices of a token in their order. Neither uses atomics, so results are deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.rounding import narrowed

_COLUMNS = 1024  # columns of a program of the sum
_PAIRS = 1024  # pairs of a step of the sort


class Route(NamedTuple):
    """Pairs sorted by expert.

    pairs: [M] int32, M = T * top_k, pair p is choice p % top_k of token p // top_k. offsets: [E+1]
    int32, expert e has pairs[offsets[e]:offsets[e+1]], in order; pairs from offsets[E] on have an
    expert outside 0..E-1 (dropped, or of another rank).
    """

    pairs: Tensor
    offsets: Tensor


def route(ids: Tensor, experts: int) -> Route:
    """Sort ids [T, top_k] int32 or int64, contiguous. Raises ValueError for other types, shapes."""
    _check(ids, experts)
    pairs = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    if ids.numel():
        block = min(_PAIRS, triton.next_power_of_2(ids.numel()))
        _route_kernel[(experts + 1,)](ids, pairs, offsets, ids.numel(), experts, block=block)
    return Route(pairs, offsets)


def route_torch(ids: Tensor, experts: int) -> Route:
    """Compute the reference of `route`: same arguments, same result, on any device."""
    _check(ids, experts)
    flat = ids.flatten().long()
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = torch.argsort(flat, stable=True)
    places = torch.arange(experts + 1, device=ids.device)
    return Route(order.int(), torch.searchsorted(flat[order], places).int())


def sum_pairs(products: Tensor) -> Tensor:
    """Sum products [T, top_k, N] -> [T, N] of the same dtype, in float32, choices in order."""
    tokens, top_k, columns = products.shape
    if not top_k:
        raise ValueError("sum of pairs: tokens have no choices")
    out = torch.empty(tokens, columns, dtype=products.dtype, device=products.device)
    if out.numel():
        grid = (tokens, triton.cdiv(columns, _COLUMNS))
        how = {"interpreted": not out.is_cuda, "block": _COLUMNS}
        _sum_kernel[grid](products.contiguous(), out, columns, top_k=top_k, **how)
    return out


def sum_pairs_torch(products: Tensor) -> Tensor:
    """Compute the reference of `sum_pairs`, bitwise the same."""
    total = products[:, 0].float()
    for choice in range(1, products.shape[1]):
        total = total + products[:, choice].float()
    return total.to(products.dtype)


def _check(ids: Tensor, experts: int) -> None:
    whole = ids.dtype in (torch.int32, torch.int64)
    if ids.dim() != 2 or not whole or not ids.is_contiguous():
        raise ValueError(
            f"routing: ids are {tuple(ids.shape)} {ids.dtype}, expected contiguous [T, top_k] int"
        )
    if experts < 1:
        raise ValueError(f"routing: to {experts} experts")


@triton.jit
def _route_kernel(ids, pairs, offsets, count, experts, block: tl.constexpr):
    mine = tl.program_id(0)  # program E collects the pairs of no expert
    lower = tl.zeros((block,), tl.int32)
    for step in range(0, count, block):
        expert = _experts(ids, step + tl.arange(0, block), count, experts)
        lower += (expert < mine).to(tl.int32)
    start = tl.sum(lower, 0)
    tl.store(offsets + mine, start)
    for step in range(0, count, block):
        pair = step + tl.arange(0, block)
        own = (_experts(ids, pair, count, experts) == mine) & (pair < count)
        one = own.to(tl.int32)
        tl.store(pairs + start + tl.cumsum(one, 0) - 1, pair, mask=own)
        start += tl.sum(one, 0)


@triton.jit
def _experts(ids, pair, count, experts):
    """Load the experts of pairs; E for no expert, more for pairs past `count`."""
    expert = tl.load(ids + pair, mask=pair < count, other=0).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < experts), expert, experts)
    return tl.where(pair < count, expert, experts + 1)


@triton.jit
def _sum_kernel(
    products,
    out,
    columns,
    top_k: tl.constexpr,
    interpreted: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    total = tl.load(products + token * top_k * columns + column, mask=inside).to(tl.float32)
    for choice in range(1, top_k):
        place = (token * top_k + choice) * columns + column
        total += tl.load(products + place, mask=inside).to(tl.float32)
    total = narrowed(total, out.dtype.element_ty, interpreted)
    tl.store(out + token * columns + column, total, mask=inside)
