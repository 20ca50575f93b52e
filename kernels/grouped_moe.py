"""Compute a layer's experts, Y[t] = sum_j weight[t, j] down(swiglu(gate_up(x[t]))): five launches.

Route; gate and up, with rows gathered while reading and SwiGLU in the epilogue; down, each row
weighted and written to its (token, choice) pair; the sum over a token's choices. With FP8
activations the tokens are quantised first, once each, and SwiGLU's result when it is written. No
launch waits for the host and no shape depends on the routing.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglang_dspark.kernels.fp8_rows import fp8_rows
from sglang_dspark.kernels.grouped_gemm import (
    m_grouped_scatter_nt_contiguous,
    m_grouped_swiglu_nt_contiguous,
)
from sglang_dspark.kernels.grouped_layout import GroupedOperands, Weights
from sglang_dspark.kernels.grouped_reference import swiglu_reference, weight_values
from sglang_dspark.kernels.routing import route


def fused_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weights, down: Weights, fp8: bool = False
) -> Tensor:
    """Compute the experts of x [T, d] bfloat16: [T, d] bfloat16.

    ids: [T, top_k] int32 or int64, a choice outside 0..E-1 counts as zero (another rank has it).
    weights: [T, top_k] float32. gate_up: rows of gate, then of up, [E, 2I, d]. down: [E, d, I].
    fp8: activations in FP8, 1 x 128 scales; the weights must then be quantised. Raises ValueError
    where they do not fit each other.
    """
    routed = route(ids, len(gate_up.weight))
    rows, scale = fp8_rows(x) if fp8 else (x, None)
    middle = m_grouped_swiglu_nt_contiguous(
        GroupedOperands(
            rows,
            gate_up.weight,
            routed.offsets,
            scale,
            gate_up.weight_scale,
            weight_global=gate_up.weight_global,
            pairs=routed.pairs,
            top_k=ids.shape[1],
        ),
        fp8=fp8,
    )
    second = GroupedOperands(
        middle.x,
        down.weight,
        routed.offsets,
        middle.x_scale,
        down.weight_scale,
        weight_global=down.weight_global,
    )
    return m_grouped_scatter_nt_contiguous(second, routed.pairs, weights)


def fused_experts_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weights,
    down: Weights,
    through: Callable[[Tensor], Tensor] = Tensor.double,
) -> Tensor:
    """Compute [T, d] float64, expert by expert. through: function applied to the rows before each
    product, by default only a conversion to float64."""
    first, second = weight_values(gate_up), weight_values(down)
    out = x.double().new_zeros(x.shape)
    for e in range(len(first)):
        token, choice = (ids == e).nonzero(as_tuple=True)
        middle = swiglu_reference(through(x[token]) @ first[e].T)
        product = through(middle) @ second[e].T
        out.index_add_(0, token, product * weights[token, choice].double()[:, None])
    return out
