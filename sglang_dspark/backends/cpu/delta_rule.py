"""Implement the operators of gated delta rule layers (GDN: Qwen3.5) for a CPU.

SGLang imports them from the CPU build of `sgl_kernel`, which requires AVX512 or AMX: the short
convolution, the gates, the recurrence over a state, and fused pieces of Qwen3.5. Names, argument
order and in-place results are upstream's (sglang/srt/layers/attention/linear/). csrc/delta.cpp
computes float32: a window of several tokens has the bits of one token at a time. Torch computes
other dtypes, and everything without the library.

N tokens of R sequences; H key heads, HV value heads; K, V head dimensions; W width of the
convolution. Upstream's tensors of tokens have a first dimension of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.backends.cpu.csrc import operator
from sglang_dspark.backends.cpu.threads import pool_threads

_P, _N = c_void_p, c_int64
_CONVOLVE = ("convolve_rows", _P, _N, _N, _N, _P, _P, _P)
_GATES = ("delta_gates", _P, _P, _P, _P, _N, _N, _P, _P)
_RULE = ("delta_rule", *(_P, _N) * 3, *(_P,) * 5, _N, _P, _P, *(_N,) * 5, _P, _N)
_MOST_KEY_DIM = 512  # of csrc/delta.cpp


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve sequences [dim, N] and store the last W - 1 inputs of each in conv_states."""
    rows, starts, kept = x.t(), query_start_loc.tolist(), weight.shape[1] - 1
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)  # [N, dim]
    for row, slot in enumerate(cache_indices.tolist()):
        part, state = slice(starts[row], starts[row + 1]), conv_states[slot]
        past = state if has_initial_state[row] else torch.zeros_like(state)
        seen = torch.cat((past.t(), rows[part]))
        out[part] = _convolve(seen, weight, bias)
        state.copy_(seen[-kept:].t())
    return out.t()


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Convolve windows [R, dim, T], or one token each [R, dim].

    With `intermediate_conv_window` [.., T, dim, W - 1] the inputs behind each token go there, and
    conv_state stays as it was.
    """
    tokens = (x if x.dim() == 3 else x.unsqueeze(-1)).transpose(1, 2)  # [R, T, dim]
    slots, kept = conv_state_indices.long(), weight.shape[1] - 1
    seen = torch.cat((conv_state[slots].transpose(1, 2), tokens), dim=1)  # [R, W - 1 + T, dim]
    if intermediate_conv_window is None:
        conv_state[slots] = seen[:, -kept:].transpose(1, 2).to(conv_state.dtype)
    else:
        assert intermediate_state_indices is not None
        windows = seen.unfold(1, kept, 1)[:, 1:]  # [R, T, dim, W - 1]
        rows = intermediate_state_indices.long()
        held = windows.to(intermediate_conv_window.dtype)
        intermediate_conv_window[rows, : tokens.shape[1]] = held
    # A state of another dtype makes `seen` wider: windows and tokens round alike.
    out = _convolve(seen, weight, bias).to(x.dtype)
    return out.transpose(1, 2) if x.dim() == 3 else out.squeeze(1)


def _convolve(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return silu(convolution) [.., n, dim] of contiguous rows [.., W - 1 + n, dim]."""
    width = weight.shape[1]
    length, run = seen.shape[-2] - width + 1, operator(*_CONVOLVE)
    if run is None or not _are_floats(seen, weight, *([] if bias is None else [bias])):
        total = (seen.unfold(-2, width, 1) * weight).sum(-1)
        return F.silu(total if bias is None else total + bias)
    taps, out = weight.t().contiguous(), seen.new_empty(*seen.shape[:-2], length, len(weight))
    for source, target in zip(
        seen.view(-1, *seen.shape[-2:]), out.view(-1, *out.shape[-2:]), strict=True
    ):
        run(
            source.data_ptr(), length, len(weight), width, taps.data_ptr(),
            None if bias is None else bias.data_ptr(), target.data_ptr(),
        )  # fmt: skip
    return out


def _are_floats(*tensors: Tensor) -> bool:
    return all(each.dtype is torch.float32 for each in tensors)


def fused_gdn_gating_cpu(
    a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return decay and learning rate [1, N, HV] of a [N, HV], b [N, HV].

    Upstream's kernels return the logarithm of the decay; only our recurrence reads it.
    """
    run = operator(*_GATES)
    if run is None or not _are_floats(a_log, a, b, dt_bias):
        decay = (-a_log.float().exp() * F.softplus(a.float() + dt_bias.float())).exp()
        return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)
    a, b = a.contiguous(), b.contiguous()
    decay, rate = a.new_empty(1, *a.shape), a.new_empty(1, *a.shape)
    run(
        a.data_ptr(), b.data_ptr(), a_log.data_ptr(), dt_bias.data_ptr(), *a.shape,
        decay.data_ptr(), rate.data_ptr(),
    )  # fmt: skip
    return decay, rate


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Run the recurrence over prompts; states [.., HV, V, K] are updated in place."""
    out = _delta_rule(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    **_: Any,
) -> Tensor:
    """Run gates and recurrence over windows of cu_seqlens [R + 1].

    With `intermediate_states_buffer` [.., T, HV, V, K] the state behind each token goes there, and
    the states stay as they were.
    """
    decay, rate = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    kept = None
    if intermediate_states_buffer is not None:
        assert intermediate_state_indices is not None
        assert cache_steps == intermediate_states_buffer.shape[1]
        kept = (intermediate_states_buffer, intermediate_state_indices)
    return _delta_rule(
        q, k, v, decay, rate, initial_state_source, initial_state_indices, cu_seqlens, kept
    )


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    kept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return [1, N, HV, V]: each token decays its sequence's state, corrects it and reads it.

    kept: a place [.., T, HV, V, K] for the state behind each token, and its rows [R].
    """
    room = () if kept is None else kept[:1]
    run, rows = operator(*_RULE), [each[0].flatten(1) for each in (q, k, v)]
    whole = all(each.is_contiguous() for each in (states, *room))
    if (
        run is None
        or not whole
        or not _are_floats(q, k, v, states, *room)
        or q.shape[-1] > _MOST_KEY_DIM
        or any(each.stride(1) != 1 for each in rows)
    ):
        return delta_rule_torch(q, k, v, decay, rate, states, slots, starts, kept)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    slots, starts = slots.int().contiguous(), starts.int().contiguous()
    held = slots if kept is None else kept[1].int().contiguous()
    place: tuple[int | None, int | None, int] = (None, None, 0)
    if kept is not None:
        place = (kept[0].data_ptr(), held.data_ptr(), kept[0].shape[1])
    run(
        *(part for each in rows for part in (each.data_ptr(), each.stride(0))),
        decay.data_ptr(), rate.data_ptr(), states.data_ptr(), slots.data_ptr(), starts.data_ptr(),
        len(starts) - 1, *place, v.shape[2], q.shape[2], v.shape[3], q.shape[3], out.data_ptr(),
        pool_threads(torch.get_num_threads()),
    )  # fmt: skip
    return out


def delta_rule_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    kept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute `_delta_rule` in torch."""
    groups = v.shape[2] // q.shape[2]
    query = _unit(q[0]).repeat_interleave(groups, 1) * q.shape[-1] ** -0.5  # [N, HV, K]
    key = _unit(k[0]).repeat_interleave(groups, 1)
    value, out = v[0].float(), torch.empty_like(v[0])
    bounds = starts.tolist()
    for row, slot in enumerate(slots[: len(bounds) - 1].tolist()):
        state = states[slot].float()  # [HV, V, K]
        for step, token in enumerate(range(bounds[row], bounds[row + 1])):
            state = state * decay[0, token, :, None, None]
            found = (state * key[token, :, None]).sum(-1)
            change = (value[token] - found) * rate[0, token, :, None]
            state = state + change[:, :, None] * key[token, :, None]
            out[token] = (state * query[token, :, None]).sum(-1)
            if kept is not None:
                kept[0][kept[1][row], step] = state
        if kept is None:
            states[slot] = state
    return out.unsqueeze(0)


def _unit(rows: Tensor) -> Tensor:
    rows = rows.float()
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v in one [N, ..], z [N, HV, V], b and a [N, HV] of the two projections."""
    width = 2 * key_heads * key_dim + value_heads * value_dim
    z = qkvz[:, width:].reshape(-1, value_heads, value_dim)
    b, a = (half.contiguous() for half in ba.split(value_heads, dim=-1))
    return qkvz[:, :width].contiguous(), z, b, a


def fused_rmsnorm_gated_cpu(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    eps: float,
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """Return rms_norm(x) * weight * activation(gate), in x's dtype."""
    normed = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (normed * activation(gate.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Norm each head of q and k by weights that are stored less 1."""
    return _gemma_norm(q, q_weight, eps, head_dim), _gemma_norm(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split each head's query from its gate, and norm queries and keys."""
    q, gate = q_gate.view(len(q_gate), heads, 2 * head_dim).chunk(2, dim=-1)
    return (
        _gemma_norm(q, q_weight, eps, head_dim),
        _gemma_norm(k, k_weight, eps, head_dim),
        gate.reshape(len(gate), -1),
    )


def _gemma_norm(rows: Tensor, weight: Tensor, eps: float, head_dim: int) -> Tensor:
    heads = rows.reshape(len(rows), -1, head_dim).float()
    return F.rms_norm(heads, (head_dim,), 1 + weight.float(), eps).to(rows.dtype).flatten(1)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply x by sigmoid(gate) in place."""
    x.mul_(gate.sigmoid())


def store_accepted(worker: Any, batch: Any, counts: Tensor) -> None:
    """Store the states behind the last accepted token of each window; counts: [R], 1 or more.

    Upstream's `update_mamba_state_after_mtp_verify` (hybrid_linear_attn_backend.py) does it by
    Triton kernels, and keeps states for prefixes, which needs `extra_buffer`, not on a CPU.
    """
    pool = worker.model_runner.req_to_token_pool
    copy_states(
        pool.get_speculative_mamba2_params_all_layers(),
        pool.get_mamba_indices(batch.req_pool_indices),
        counts - 1,
    )


def copy_states(caches: Any, slots: Tensor, steps: Tensor) -> None:
    """Copy the states behind token `steps[r]` [R] of each window to `slots` [R].

    A request with -1 in either has none.
    """
    rows = torch.nonzero((steps >= 0) & (slots >= 0)).flatten()
    into, step = slots[rows].long(), steps[rows].long()
    pairs = [(caches.temporal, caches.intermediate_ssm)]
    pairs += zip(caches.conv, caches.intermediate_conv_window, strict=True)
    for states, behind in pairs:  # [layers, .., state], [layers, R, T, state]
        states[:, into] = behind[:, rows, step]
