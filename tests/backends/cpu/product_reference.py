"""Products in torch with the sum order of csrc/matmul.cpp, one function a format, and the
instruction sets to compare them on.

A fused multiply-add is emulated in float64, where a product of two float32 numbers is exact.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.linear import LANES, Processor
from sglang_dspark.backends.cpu.weight_formats import GROUP, dense, half_rows, int8_rows

PROCESSORS = ("host", "avx512", "avx2")
_NARROWER = {"avx512": Processor(3), "avx2": Processor(1)}


def processor_named(name: str) -> Processor:
    """The host, or one that has less; skips the test where the host does not have as much."""
    chosen = _NARROWER.get(name, Processor.host())
    if chosen.bits & ~Processor.host().bits:
        pytest.skip(f"this processor has no {name}")
    return chosen


def fused(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, rounded once; all float32."""
    return (total.double() + a.double() * b.double()).float()


def float_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [m, K] W^T, W [n, K] float32: a chain of fused multiply-adds over ascending k in each of 16
    lanes, then the lanes pairwise."""
    rows = x.unflatten(1, (-1, LANES))[:, None]  # [m, 1, K / 16, 16]
    others = weight.unflatten(1, (-1, LANES))[None]  # [1, n, K / 16, 16]
    total = torch.zeros(len(x), len(weight), LANES)
    for step in range(rows.shape[2]):
        total = fused(total, rows[:, :, step], others[:, :, step])
    return _pairwise(total)


def rounded_product(x: Tensor, packed: Tensor) -> Tensor:
    """x [m, K] rounded to bfloat16, W [n, K] bfloat16: each lane adds the second and then the first
    of two neighbouring products."""
    rows = half_rows(x).unflatten(1, (-1, LANES, 2))[:, None]  # [m, 1, K / 32, 16, 2]
    others = dense(packed).unflatten(1, (-1, LANES, 2))[None]
    total = torch.zeros(len(x), len(packed), LANES)
    for step in range(rows.shape[2]):
        for place in (1, 0):
            total = fused(total, rows[:, :, step, :, place], others[:, :, step, :, place])
    return _pairwise(total)


def _pairwise(total: Tensor) -> Tensor:
    """Sum 16 lanes [..., 16]: i and i + 8, then i + 4, i + 2, i + 1."""
    while total.shape[-1] > 1:
        lower, upper = total.chunk(2, -1)
        total = lower + upper
    return total[..., 0]


def byte_product(x: Tensor, packed: Tensor) -> Tensor:
    """x [m, K] W^T, W [n, K] of `BYTES`, in the kernel's order: exact sums of a group's columns,
    fused multiply-adds by the product of both scales over ascending k."""
    (m, k), n = x.shape, len(packed)
    weight, scales = int8_rows(packed, torch.arange(n))
    groups = x.view(m, -1, GROUP)
    top = groups.abs().amax(-1, keepdim=True)
    whole = (groups * torch.where(top > 0, torch.full_like(top, 127.0) / top, 0.0)).round().long()
    total = torch.zeros(m, n)
    for group in range(k // GROUP):
        sums = whole[:, group] @ weight[:, group].long().T
        both = scales[None, :, group] * (top / 127.0)[:, group]
        total = (total.double() + sums.double() * both.double()).float()
    return total


def integer_product(x: Tensor, packed: Tensor) -> Tensor:
    """x [m, K] W^T, int8 W [n, K], in the kernel's order: exact sums of a group's columns, fused
    multiply-adds by the group's scale over ascending k, the row's scale.
    """
    (m, k), n = x.shape, len(packed)
    weight, scales = int8_rows(packed, torch.arange(n))
    top = x.abs().amax(-1, keepdim=True)
    whole = (x * torch.where(top > 0, torch.full_like(top, 32767.0) / top, 0.0)).round().long()
    total = torch.zeros(m, n)
    for group in range(k // GROUP):  # in float64 a product is exact, so this rounds as fused ones
        sums = whole.view(m, -1, GROUP)[:, group] @ weight[:, group].long().T
        step = sums.float().double() * scales[None, :, group].double()
        total = (total.double() + step).float()
    return total * (top / 32767.0)
