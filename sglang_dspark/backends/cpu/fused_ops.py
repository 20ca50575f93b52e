"""Compute RMSNorm, rotary embedding and SiLU gate in one pass each over the rows (Numba).

SGLang's own `forward_native` of these operators (sglang/srt/layers/{layernorm,activation}.py,
rotary_embedding/base.py) makes three to fifteen torch calls; for a handful of rows the calls cost
more than the arithmetic. `register` adds ours to SGLang's dispatch for out-of-tree platforms.
`forward_native` computes what they do not support: other dtypes and options.

Results are batch-invariant, and bitwise the same in every compilation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.jit import kernel
from sglang_dspark.backends.cpu.lanes import lane_sum
from sglang_dspark.float_ops import exp32, fma
from sglang_dspark.serving import upstream

_FLOAT = torch.float32


@kernel
def _one_over_rms(squares, epsilon):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean + epsilon) of squares [d]."""
    mean = lane_sum(squares) / np.float32(squares.shape[0])
    return np.float32(1.0) / np.sqrt(mean + np.float32(epsilon))


@kernel
def rms_norm_rows(x, weight, epsilon, out):  # type: ignore[no-untyped-def]
    """out = x / rms(x) * weight; x, out [n, d], weight [d]; out does not alias x."""
    for i in range(x.shape[0]):
        row, target = x[i], out[i]
        for d in range(row.shape[0]):
            target[d] = row[d] * row[d]
        scale = _one_over_rms(target, epsilon)
        for d in range(row.shape[0]):
            target[d] = (row[d] * scale) * weight[d]


@kernel
def add_rms_norm_rows(x, residual, weight, epsilon, total, out):  # type: ignore[no-untyped-def]
    """total = x + residual and out = its norm; all [n, d], out and total do not alias."""
    for i in range(x.shape[0]):
        row, carried, kept, target = x[i], residual[i], total[i], out[i]
        for d in range(row.shape[0]):
            value = row[d] + carried[d]
            kept[d] = value
            target[d] = value * value
        scale = _one_over_rms(target, epsilon)
        for d in range(row.shape[0]):
            target[d] = (kept[d] * scale) * weight[d]


@kernel
def rms_norm_heads(x, first, heads, weight, epsilon):  # type: ignore[no-untyped-def]
    """Heads first..first+heads-1 of x [n, all heads * d] normed in place; weight [d]."""
    width = weight.shape[0]
    squares = np.empty(width, np.float32)
    for i in range(x.shape[0]):
        for h in range(first, first + heads):
            row = x[i, h * width : (h + 1) * width]
            for d in range(width):
                squares[d] = row[d] * row[d]
            scale = _one_over_rms(squares, epsilon)
            for d in range(width):
                row[d] = (row[d] * scale) * weight[d]


@kernel
def silu_and_mul_rows(x, out):  # type: ignore[no-untyped-def]
    """out = silu(x[:, :d]) * x[:, d:]; x [n, 2d], out [n, d]."""
    width = out.shape[1]
    for i in range(x.shape[0]):
        gate, up, target = x[i, :width], x[i, width:], out[i]
        for d in range(width):
            target[d] = gate[d] / (np.float32(1.0) + exp32(-gate[d])) * up[d]


@kernel
def rotate_rows(positions, cos_sin, query, key, width):  # type: ignore[no-untyped-def]
    """Rotate the first cos_sin.shape[1] dimensions of every head in place, halves paired.

    positions [n], cos_sin [positions, rotary] (cosines, then sines), query and key [n, heads * d],
    width: d.
    """
    half = cos_sin.shape[1] // 2
    for i in range(positions.shape[0]):
        cosine, sine = cos_sin[positions[i], :half], cos_sin[positions[i], half:]
        for x in (query[i], key[i]):
            for start in range(0, x.shape[0], width):
                first, second = x[start : start + half], x[start + half : start + 2 * half]
                for d in range(half):
                    a, b = first[d], second[d]
                    first[d] = fma(a, cosine[d], -(b * sine[d]))
                    second[d] = fma(b, cosine[d], a * sine[d])


def rms_norm(
    op: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`RMSNorm.forward`: x [..., d] -> the norm, with a residual also x + residual."""
    weight = op.weight  # one look-up: attributes of modules are slow
    width = weight.shape[0]
    if (
        x.dtype != _FLOAT
        or weight.dtype != _FLOAT
        or x.shape[-1] != width
        or op.variance_size_override is not None
        or op.override_orig_dtype not in (None, _FLOAT)
        or post_residual_addition is not None
        or (residual is not None and (residual.dtype != _FLOAT or residual.shape != x.shape))
    ):
        return op.forward_native(x, residual, post_residual_addition, quant_linear)
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    out = x.new_empty(rows.shape)
    scale = weight.detach().numpy()
    if residual is None:
        rms_norm_rows(rows.numpy(), scale, op.variance_epsilon, out.numpy())
        return out if rows is x else out.view(x.shape)
    carried = residual if rows is x else residual.reshape(-1, width)
    total = x.new_empty(rows.shape)
    add_rms_norm_rows(
        rows.numpy(), carried.numpy(), scale, op.variance_epsilon, total.numpy(), out.numpy()
    )
    return (out, total) if rows is x else (out.view(x.shape), total.view(x.shape))


def silu_and_mul(op: Any, x: Tensor) -> Tensor:
    """`SiluAndMul.forward`: x [..., 2d] -> silu(first half) * second half, [..., d]."""
    width = x.shape[-1] // 2
    if x.dtype != _FLOAT:
        return op.forward_native(x)
    rows = x if x.dim() == 2 else x.reshape(-1, 2 * width)
    out = x.new_empty(rows.shape[0], width)
    silu_and_mul_rows(rows.numpy(), out.numpy())
    return out if rows is x else out.view(*x.shape[:-1], width)


def rotary(
    op: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    """`RotaryEmbedding.forward`: rotates query and key [n, heads * d] in place and returns them."""
    table = op.cos_sin_cache
    if (
        query.dtype != _FLOAT
        or key.dtype != _FLOAT
        or table.dtype != _FLOAT
        or not op.is_neox_style
        or offsets is not None
        or fused_set_kv_buffer_arg is not None
        or positions.dim() != 1
        or query.dim() != 2
        or key.dim() != 2
    ):
        return op.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    rotate_rows(positions.numpy(), table.numpy(), query.numpy(), key.numpy(), op.head_size)
    return query, key


def register(dispatch_key: str) -> None:
    """Add the operators to SGLang's dispatch under the platform's key; idempotent.

    Exact classes only: a subclass with a `forward` of its own keeps it. `Llama3RotaryEmbedding`
    differs from its parent in the cosine table alone.
    """
    upstream.BaseFusedOp.register_oot_forward(upstream.RMSNorm, rms_norm, dispatch_key)
    upstream.BaseFusedOp.register_oot_forward(upstream.SiluAndMul, silu_and_mul, dispatch_key)
    for op in (upstream.RotaryEmbedding, upstream.Llama3RotaryEmbedding):
        upstream.BaseFusedOp.register_oot_forward(op, rotary, dispatch_key)
