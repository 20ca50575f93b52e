"""Compute RMSNorm, rotary embedding and SiLU gate in one pass each over the rows.

SGLang's own `forward_native` of these operators (sglang/srt/layers/{layernorm,activation}.py,
rotary_embedding/base.py) makes three to fifteen torch calls; for a handful of rows the calls cost
more than the arithmetic. `register` adds ours (csrc/rows.cpp) to SGLang's dispatch for out-of-tree
platforms. `forward_native` computes unsupported inputs: other types, strides and options.

Results are batch-invariant, and bitwise the same on every processor.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.csrc import operator
from sglang_dspark.backends.cpu.fast_paths import require_library, supported
from sglang_dspark.serving import upstream

_FLOAT = torch.float32
_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_NORM = ("rms_norm_rows", _P, _N, _N, _N, _P, _F, _P)
_ADD_NORM = ("add_rms_norm_rows", _P, _N, _P, _N, _N, _N, _P, _F, _P, _P)
_GATE = ("silu_and_mul_rows", _P, _N, _N, _N, _P)
_ROTATE = ("rotate_rows", _P, _P, _N, _P, *(_N,) * 4)


def _run(what: Any, *given: Any) -> None:
    """Run an operator; `register` required the library."""
    run = operator(*what)
    assert run is not None
    run(*given)


def _rows(x: Tensor) -> Tensor:
    """View or copy [..., d] as rows [n, d] whose numbers are contiguous."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rms_norm(
    op: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `RMSNorm.forward`: x [..., d] -> the norm, with a residual also x + residual."""
    weight = op.weight  # one look-up: attributes of modules are slow
    width = weight.shape[0]
    if (
        not x.dtype == weight.dtype == _FLOAT
        or not weight.is_contiguous()
        or x.shape[-1] != width
        or op.variance_size_override is not None
        or op.override_orig_dtype not in (None, _FLOAT)
        or post_residual_addition is not None
        or (residual is not None and (residual.dtype != _FLOAT or residual.shape != x.shape))
    ):
        return op.forward_native(x, residual, post_residual_addition, quant_linear)
    rows = _rows(x)
    n, out = rows.shape[0], torch.empty_like(x, memory_format=torch.contiguous_format)
    end = weight.data_ptr(), op.variance_epsilon
    if residual is None:
        _run(_NORM, rows.data_ptr(), rows.stride(0), n, width, *end, out.data_ptr())
        return out
    carried, total = _rows(residual), torch.empty_like(out)
    _run(
        _ADD_NORM, rows.data_ptr(), rows.stride(0), carried.data_ptr(), carried.stride(0), n, width,
        *end, total.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out, total


def silu_and_mul(op: Any, x: Tensor) -> Tensor:
    """Compute `SiluAndMul.forward`: x [..., 2d] -> silu(first half) * second half, [..., d]."""
    width = x.shape[-1] // 2
    if x.dtype != _FLOAT:
        return op.forward_native(x)
    rows, out = _rows(x), x.new_empty(*x.shape[:-1], width)
    _run(_GATE, rows.data_ptr(), rows.stride(0), rows.shape[0], width, out.data_ptr())
    return out


def rotary(
    op: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    """Compute `RotaryEmbedding.forward`: rotate query and key [n, heads * d] in place."""
    table = op.cos_sin_cache
    if (
        not query.dtype == key.dtype == table.dtype == _FLOAT
        or not op.is_neox_style
        or offsets is not None
        or fused_set_kv_buffer_arg is not None
        or positions.dim() != 1
        or positions.dtype != torch.int64
        or not query.dim() == key.dim() == 2
        or not query.stride(1) == key.stride(1) == positions.stride(0) == 1
        or not table.is_contiguous()
    ):
        return op.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    width = op.head_size
    shared = positions.data_ptr(), table.data_ptr(), table.shape[1]
    for x in (query, key):
        _run(_ROTATE, *shared, x.data_ptr(), x.stride(0), x.shape[0], x.shape[1] // width, width)
    return query, key


def register(dispatch_key: str) -> None:
    """Add the operators to SGLang's dispatch under the platform's key; idempotent.

    Without the library SGLang's operators stay, which is logged. Only exact classes: a subclass
    with its own `forward` keeps it. `Llama3RotaryEmbedding` differs from its parent only in the
    cosine table.
    """
    if not supported("norms, rotary embedding and SiLU gate by one kernel each", require_library):
        return
    upstream.BaseFusedOp.register_oot_forward(upstream.RMSNorm, rms_norm, dispatch_key)
    upstream.BaseFusedOp.register_oot_forward(upstream.SiluAndMul, silu_and_mul, dispatch_key)
    for op in (upstream.RotaryEmbedding, upstream.Llama3RotaryEmbedding):
        upstream.BaseFusedOp.register_oot_forward(op, rotary, dispatch_key)
