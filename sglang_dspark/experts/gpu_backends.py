"""Backends for CUDA devices: our Triton kernels, DeepGEMM, FlashInfer. Importing this registers
them; their libraries are imported when weights are prepared.

Our kernels are compared with float64 in Triton's interpreter and timed on one H200
(docs/results-gpu.md). The calls of DeepGEMM and FlashInfer follow SGLang's (layers/
deep_gemm_wrapper/entrypoint.py, layers/moe/moe_runner/{deep_gemm,flashinfer_cutlass}.py) and have
not been run.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from sglang_dspark.experts.backends import (
    Backend,
    Call,
    ExpertWeights,
    ExpertWorkload,
    joined,
    needs,
    register,
)
from sglang_dspark.quantisation import bf16, fp8, nvfp4
from sglang_dspark.quantisation.layout import Quantised

if TYPE_CHECKING:
    from sglang_dspark.kernels.grouped_layout import Weights

ALIGNED = 128  # groups of DeepGEMM's contiguous layout are padded to a multiple of this many rows
_BF16_FROM, _FP8_FROM, _HOPPER = (8, 0), (8, 9), (9, 0)


def on_cuda(s: ExpertWorkload, least: tuple[int, int]) -> str | None:
    """Return why a workload is not on a CUDA device of at least this capability, or None."""
    if s.device != "cuda":
        return "for CUDA devices"
    if s.capability is None or s.capability < least:
        return f"needs compute capability {least[0]}.{least[1]}"
    return None


def _triton_refusal(s: ExpertWorkload) -> str | None:
    if s.format == fp8.NAME and s.inner % fp8.BLOCK:
        return f"fp8 experts of width {s.inner}, no multiple of {fp8.BLOCK}"
    return on_cuda(s, _BF16_FROM if s.format == bf16.NAME else _FP8_FROM)


def _triton_fp8_refusal(s: ExpertWorkload) -> str | None:
    return "no FP8 rows with BF16 weights" if s.format == bf16.NAME else _triton_refusal(s)


def prepare_triton(weights: ExpertWeights, rows_in_fp8: bool = False) -> Call:
    """Prepare a call of our Triton kernels; it casts x of any floating type to BF16."""
    from sglang_dspark.kernels.grouped_moe import fused_experts

    gate, up, down = weights.coded()
    if weights.format == nvfp4.NAME:
        return _apart(_operand(gate), _operand(up), _operand(down), rows_in_fp8)
    gate_up, last = _operand(joined(gate, up)), _operand(down)

    def call(x: Tensor, ids: Tensor, own: Tensor) -> Tensor:
        rows = x.bfloat16().contiguous()
        return fused_experts(rows, ids.contiguous(), own, gate_up, last, rows_in_fp8).to(x.dtype)

    return call


def _apart(gate: Weights, up: Weights, down: Weights, rows_in_fp8: bool) -> Call:
    """Prepare an NVFP4 call with separate gate and up products: each has its own global scale."""
    from sglang_dspark.kernels.fp8_rows import fp8_rows
    from sglang_dspark.kernels.grouped_gemm import (
        m_grouped_gemm_nt_contiguous,
        m_grouped_scatter_nt_contiguous,
    )
    from sglang_dspark.kernels.grouped_layout import GroupedOperands
    from sglang_dspark.kernels.routing import route

    def rounded(rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return fp8_rows(rows) if rows_in_fp8 else (rows, None)

    def call(x: Tensor, ids: Tensor, own: Tensor) -> Tensor:
        routed = route(ids.contiguous(), len(gate.weight))
        rows, scale = rounded(x.bfloat16().contiguous())
        halves = [
            GroupedOperands(
                rows,
                part.weight,
                routed.offsets,
                scale,
                part.weight_scale,
                torch.float32,
                part.weight_global,
                routed.pairs,
                ids.shape[1],
            )
            for part in (gate, up)
        ]
        left, right = (m_grouped_gemm_nt_contiguous(half) for half in halves)
        middle, scale = rounded((silu(left) * right).bfloat16())
        second = GroupedOperands(
            middle, down.weight, routed.offsets, scale, down.weight_scale,
            weight_global=down.weight_global,
        )  # fmt: skip
        return m_grouped_scatter_nt_contiguous(second, routed.pairs, own).to(x.dtype)

    return call


def _operand(part: Quantised) -> Weights:
    from sglang_dspark.kernels.grouped_layout import Weights

    overall = None if part.global_scale is None else part.global_scale.flatten()
    return Weights(part.payload.contiguous(), part.scales, overall)


class Aligned(NamedTuple):
    """Places of T * k (token, expert) pairs in groups padded to whole blocks.

    place: [T * k] int64. owners: [rows] int32, the expert of each row, padding included; the unused
    rows behind the last group belong to the last expert. The host reads no values."""

    place: Tensor
    owners: Tensor


def aligned_places(ids: Tensor, experts: int) -> Aligned:
    """Assign ids [T, k] of experts 0..E-1 to rows.

    The number of rows depends only on shapes: at most U = min(T k, E) groups are in use, and the
    pairs beyond one for each group fill at most (T k - U) // 128 more blocks."""
    own = ids.flatten().long()
    pairs, used = len(own), min(len(own), experts)
    rows = ALIGNED * (used + (pairs - used) // ALIGNED)
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, own, torch.ones_like(own))
    ends = ((counts + ALIGNED - 1) // ALIGNED * ALIGNED).cumsum(0)
    order = own.argsort(stable=True)
    sorted_own = own[order]
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    before = counts.cumsum(0) - counts  # pairs of lower experts
    within = torch.arange(pairs, device=ids.device) - before[sorted_own]
    place = torch.empty_like(own)
    place[order] = starts[sorted_own] + within
    owners = torch.searchsorted(ends, torch.arange(rows, device=ids.device), right=True)
    return Aligned(place, owners.clamp(max=experts - 1).int())


def _deep_gemm_refusal(s: ExpertWorkload) -> str | None:
    if s.format != fp8.NAME:
        return "wired for fp8"
    if s.inner % fp8.BLOCK or s.width % fp8.BLOCK:
        return f"widths {s.width} x {s.inner} are no multiples of {fp8.BLOCK}"
    if s.device == "cuda" and s.capability is not None and s.capability[0] != _HOPPER[0]:
        return "wired for Hopper, whose scales are float32"
    return on_cuda(s, _HOPPER)


def _prepare_deep_gemm(weights: ExpertWeights) -> Call:
    from sglang_dspark.kernels.fp8_rows import fp8_rows

    product = import_module("deep_gemm").m_grouped_fp8_gemm_nt_contiguous
    by_columns = import_module("deep_gemm.utils.layout").get_mn_major_tma_aligned_tensor
    gate, up, down = weights.coded()
    first = joined(gate, up)

    def multiply(codes: Tensor, scale: Tensor, part: Quantised, owners: Tensor) -> Tensor:
        out = torch.empty(len(codes), part.shape[1], dtype=torch.bfloat16, device=codes.device)
        # keep `scale` alive until the call: the layout's result may share its memory
        product((codes, by_columns(scale)), (part.payload, part.scales), out, owners)
        return out

    def call(x: Tensor, ids: Tensor, own: Tensor) -> Tensor:
        place, owners = aligned_places(ids, len(first.payload))
        token = torch.arange(ids.numel(), device=x.device) // ids.shape[1]
        codes, scale = fp8_rows(x.bfloat16().contiguous())
        rows = torch.zeros(len(owners), x.shape[1], dtype=torch.uint8, device=x.device)
        rows[place] = codes.view(torch.uint8)[token]
        scales = torch.ones(len(owners), scale.shape[1], device=x.device)
        scales[place] = scale[token]
        gated = multiply(rows.view(fp8.CODES), scales, first, owners)
        left, right = gated.float().chunk(2, -1)
        codes, scale = fp8_rows((silu(left) * right).bfloat16())
        made = multiply(codes, scale, down, owners)[place].float().unflatten(0, tuple(ids.shape))
        return (made * own[..., None]).sum(1).to(x.dtype)

    return call


def _flashinfer_refusal(s: ExpertWorkload) -> str | None:
    return "wired for bf16" if s.format != bf16.NAME else on_cuda(s, _HOPPER)


def _prepare_flashinfer(weights: ExpertWeights) -> Call:
    fused = import_module("flashinfer.fused_moe").cutlass_fused_moe
    gate, up, down = weights.coded()
    first = joined(up, gate).payload  # FlashInfer expects up first

    def call(x: Tensor, ids: Tensor, own: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        fused(
            input=x.bfloat16().contiguous(),
            token_selected_experts=ids.int().contiguous(),
            token_final_scales=own,
            fc1_expert_weights=first,
            fc2_expert_weights=down.payload,
            output_dtype=torch.bfloat16,
            quant_scales=None,
            output=out,
        )
        return out.to(x.dtype)

    return call


def _with_fp8_rows(weights: ExpertWeights) -> Call:
    return prepare_triton(weights, rows_in_fp8=True)


_Prepare = Callable[[ExpertWeights], Call]
_OWN: tuple[tuple[str, Callable[[ExpertWorkload], str | None], _Prepare, str], ...] = (
    ("triton", _triton_refusal, prepare_triton, "triton"),
    ("triton-fp8", _triton_fp8_refusal, _with_fp8_rows, "triton"),
    ("deep_gemm", _deep_gemm_refusal, _prepare_deep_gemm, "deep_gemm"),
    ("flashinfer", _flashinfer_refusal, _prepare_flashinfer, "flashinfer"),
)
for _name, _refusal, _prepare, _package in _OWN:
    _backend = Backend(_name, needs(_package), _refusal, _prepare, skips=_package == "triton")
    register(_backend, before="torch")
