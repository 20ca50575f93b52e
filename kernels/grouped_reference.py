"""Reference of the grouped GEMMs, float64, expert by expert; and how far a result is from it."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from sglang_dspark.kernels.grouped_layout import SCALE_BLOCK, GroupedOperands, MaskedOperands


def m_grouped_gemm_nt_contiguous_reference(operands: GroupedOperands) -> Tensor:
    """Y [M, N] float64 of `grouped_gemm.m_grouped_gemm_nt_contiguous`, on any device."""
    operands.check()
    x, weight = _values(operands)
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for e, (first, end) in enumerate(pairwise(operands.offsets.tolist())):
        out[first:end] = x[first:end] @ weight[e].T
    return out


def m_grouped_gemm_nt_masked_reference(operands: MaskedOperands) -> Tensor:
    """Y [E, C, N] float64 of `grouped_gemm.m_grouped_gemm_nt_masked`, on any device."""
    operands.check()
    x, weight = _values(operands)
    out = x.new_zeros(*x.shape[:2], weight.shape[1])
    for e, count in enumerate(operands.counts.tolist()):
        out[e, :count] = x[e, :count] @ weight[e].T
    return out


def _values(operands: GroupedOperands | MaskedOperands) -> tuple[Tensor, Tensor]:
    """Rows and weights that the codes and scales stand for, float64."""
    x, weight = operands.x.double(), operands.weight.double()
    if operands.x_scale is not None:
        x = x * _columns(operands.x_scale, x.shape[-1])
    if operands.weight_scale is not None:
        tall = operands.weight_scale.repeat_interleave(SCALE_BLOCK, -2)[:, : weight.shape[1]]
        weight = weight * _columns(tall, weight.shape[-1])
    return x, weight


def _columns(scale: Tensor, width: int) -> Tensor:
    return scale.double().repeat_interleave(SCALE_BLOCK, -1)[..., :width]


def calc_diff(found: Tensor, expected: Tensor) -> float:
    """1 - 2 <a, b> / (|a|^2 + |b|^2): 0 when equal, about half the squared relative error when
    near; 0 for two zero tensors. It sees wrong rows however many right ones stand beside them."""
    a, b = found.double(), expected.double()
    norm = float((a * a + b * b).sum())
    return 0.0 if norm == 0 else 1 - 2 * float((a * b).sum()) / norm
