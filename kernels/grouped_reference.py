"""Compute the float64 reference of the grouped GEMMs, and the distance of a result from it."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from sglang_dspark.kernels.grouped_layout import (
    FP4_GROUPS,
    SCALE_BLOCK,
    GroupedOperands,
    Weights,
    weight_format,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def m_grouped_gemm_nt_contiguous_reference(operands: GroupedOperands) -> Tensor:
    """Compute Y [M, N] float64 of `grouped_gemm.m_grouped_gemm_nt_contiguous`, on any device."""
    operands.check()
    x, weight = activation_values(operands.x, operands.x_scale), weight_values(operands)
    if operands.pairs is not None:
        x = x[operands.pairs.long() // operands.top_k]
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for e, (first, end) in enumerate(pairwise(operands.offsets.tolist())):
        out[first:end] = x[first:end] @ weight[e].T
    return out


def swiglu_reference(product: Tensor) -> Tensor:
    """Compute silu(left half) * right half of [M, N], as `m_grouped_swiglu_nt_contiguous`."""
    gate, up = product.chunk(2, -1)
    return silu(gate) * up


def scatter_reference(product: Tensor, pairs: Tensor, weights: Tensor, used: Tensor) -> Tensor:
    """Sum product [M, N] to [T, N] as `m_grouped_scatter_nt_contiguous`; pairs, used [M]."""
    rows, own = product[used], pairs[used].long()
    out = product.new_zeros(weights.shape[0], product.shape[-1])
    out.index_add_(0, own // weights.shape[1], rows * weights.double().flatten()[own][:, None])
    return out


def activation_values(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return the rows that codes and scales represent, float64."""
    return x.double() if scale is None else x.double() * _spread(scale, SCALE_BLOCK, x.shape[-1])


def weight_values(operands: GroupedOperands | Weights) -> Tensor:
    """Return the weights [E, N, K] that codes and scales represent, float64."""
    weight, scale, form = operands.weight, operands.weight_scale, weight_format(operands)
    if scale is None:
        return weight.double()
    if form == "fp8":
        tall = scale.repeat_interleave(SCALE_BLOCK, -2)[:, : weight.shape[1]]
        return weight.double() * _spread(tall, SCALE_BLOCK, weight.shape[-1])
    table = torch.tensor(E2M1, dtype=torch.float64, device=weight.device)
    codes = torch.stack([weight & 15, weight >> 4], -1).flatten(-2)
    if form == "mxfp4":
        factor = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), scale.int() - 127)
        factor = factor.masked_fill(scale == 255, float("nan"))
    else:
        assert operands.weight_global is not None  # `check` requires it
        factor = scale.double() * operands.weight_global.double()[:, None, None]
    return table[codes.long()] * _spread(factor, FP4_GROUPS[form], codes.shape[-1])


def _spread(scale: Tensor, group: int, width: int) -> Tensor:
    return scale.double().repeat_interleave(group, -1)[..., :width]


def calc_diff(found: Tensor, expected: Tensor) -> float:
    """Compute 1 - 2 <a, b> / (|a|^2 + |b|^2): 0 when equal, about half the squared relative error
    when near; 0 for two zero tensors. It finds wrong rows among any number of right ones."""
    a, b = found.double(), expected.double()
    norm = float((a * a + b * b).sum())
    return 0.0 if norm == 0 else 1 - 2 * float((a * b).sum()) / norm
