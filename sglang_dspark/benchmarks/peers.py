"""Wrap peers of `experts`: torch, SGLang's Triton fused MoE, DeepGEMM.

This package requires no peer, so each is imported by name when it is used. A peer that
is not installed or refuses a shape is a row with the reason and without a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.functional import silu

from sglang_dspark.kernels.fp8_rows import fp8_rows
from sglang_dspark.kernels.grouped_layout import Weights
from sglang_dspark.kernels.routing import route

Call = Callable[[], object]
_ALIGNED = 128  # DeepGEMM requires groups of a multiple of this many rows


@dataclass(frozen=True)
class Case:
    """A layer's operands on the device; see `grouped_moe.fused_experts`. kind: `rows x weights`."""

    kind: str
    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Weights
    down: Weights


def torch_layer(case: Case) -> Call:
    """Sort, `torch._grouped_mm` twice, sum: BF16 only."""
    _only(case, "bf16 x bf16")
    grouped = torch._grouped_mm
    experts, top_k = len(case.gate_up.weight), case.ids.shape[1]

    def call() -> Tensor:
        flat = case.ids.flatten()
        order = torch.argsort(flat, stable=True)
        ends = torch.searchsorted(flat[order], torch.arange(1, experts + 1, device=flat.device))
        both = grouped(case.x[order // top_k], case.gate_up.weight.mT, offs=ends.int())
        gate, up = both.chunk(2, -1)
        product = grouped(silu(gate) * up, case.down.weight.mT, offs=ends.int())
        own = case.weights.flatten()[order, None].to(product.dtype)
        pairs = torch.empty_like(product).index_copy_(0, order, product * own)
        return pairs.view(*case.ids.shape, -1).sum(1)

    return call


def sglang_layer(case: Case) -> Call:
    """Prepare SGLang's Triton fused MoE, BF16 or FP8 with 128 x 128 scales."""
    _only(case, "bf16 x bf16", "fp8 x fp8")
    room = "sglang.srt.layers.moe"
    fused_moe = import_module(f"{room}.moe_runner.triton_utils.fused_moe").fused_moe
    config = import_module(f"{room}.moe_runner").MoeRunnerConfig(inplace=False)
    logits = torch.zeros(len(case.x), len(case.gate_up.weight), device=case.x.device)
    topk = import_module(f"{room}.topk").StandardTopKOutput(case.weights, case.ids.int(), logits)
    scaled = {
        "use_fp8_w8a8": True,
        "w1_scale": case.gate_up.weight_scale,
        "w2_scale": case.down.weight_scale,
        "block_shape": [128, 128],
    }
    how = scaled if case.kind == "fp8 x fp8" else {}
    return lambda: fused_moe(case.x, case.gate_up.weight, case.down.weight, topk, config, **how)


def deepgemm_gate_up(case: Case) -> Call:
    """Prepare DeepGEMM's contiguous FP8 product of the gate-up weights; the preparation of its
    rows, each group padded to 128, is not timed."""
    _only(case, "fp8 x fp8")
    library = import_module("deep_gemm")
    aligned = import_module("deep_gemm.utils.layout").get_mn_major_tma_aligned_tensor
    routed = route(case.ids, len(case.gate_up.weight))
    counts = routed.offsets.diff()
    filled = (counts + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    starts = filled.cumsum(0) - filled
    experts = torch.arange(len(counts), device=counts.device, dtype=torch.int32)
    owners = experts.repeat_interleave(filled)
    own = experts.repeat_interleave(counts).long()
    place = torch.arange(len(own), device=own.device) - routed.offsets[own] + starts[own]
    codes, scales = fp8_rows(case.x)
    tokens = routed.pairs[: len(own)].long() // case.ids.shape[1]
    rows = torch.zeros(len(owners), codes.shape[1], dtype=torch.uint8, device=codes.device)
    rows[place] = codes.view(torch.uint8)[tokens]
    row_scales = torch.ones(len(owners), scales.shape[1], device=scales.device)
    row_scales[place] = scales[tokens]
    left = (rows.view(codes.dtype), aligned(row_scales))
    right = (case.gate_up.weight, case.gate_up.weight_scale)
    columns = case.gate_up.weight.shape[1]
    out = torch.empty(len(owners), columns, dtype=torch.bfloat16, device=rows.device)
    return lambda: library.m_grouped_fp8_gemm_nt_contiguous(left, right, out, owners)


LAYER_PEERS = {"torch grouped_mm": torch_layer, "SGLang Triton fused MoE": sglang_layer}
PRODUCT_PEERS = {"DeepGEMM contiguous": deepgemm_gate_up}


def _only(case: Case, *kinds: str) -> None:
    if case.kind not in kinds:
        raise ValueError(f"has no {case.kind}")
