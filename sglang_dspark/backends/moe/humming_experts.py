"""Use SGLang's Humming runner for experts, where `humming-kernels` is installed.

MXFP4 weights and BF16 rows: sglang/srt/layers/moe/moe_runner/humming.py, whose weights
`prepare_humming_moe_layer` (layers/quantization/humming_utils.py) lays out, as
layers/quantization/mxfp4_humming_moe.py does for DeepSeek-V4. Written from these sources; it has
not been run on a GPU, so only a measurement, which also compares results, selects it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_dspark.experts.backends import (
    Backend,
    Call,
    ExpertWeights,
    ExpertWorkload,
    joined,
    needs,
)
from sglang_dspark.experts.gpu_backends import on_cuda
from sglang_dspark.quantisation import mxfp4
from sglang_dspark.quantisation.layout import Quantised
from sglang_dspark.serving import upstream

_COLUMNS = 128  # SGLang pads K of a layer to multiples of it, but not its buffers


class HummingLayer(nn.Module):
    """The fields of SGLang's FusedMoE layer that the runner reads: shapes, and weights by name.

    w13_weight [E, 2I, d/2] int8, two codes each; w13_weight_scale [E, 2I, d/32] E8M0, gate before
    up; w2_weight [E, d, I/2] and w2_weight_scale [E, d, I/32].
    """

    def __init__(self, gate_up: Quantised, down: Quantised) -> None:
        super().__init__()
        experts, rows, width = gate_up.shape
        self.num_local_experts = self.num_experts = experts
        self.intermediate_size_per_partition = rows // 2
        self.hidden_size = width
        self.params_dtype = torch.bfloat16
        self.with_bias = False
        self.layer_name = "experts"
        for name, part in (("w13", gate_up), ("w2", down)):
            assert part.scales is not None, "MXFP4 has scales"
            codes = part.payload.view(torch.int8)
            scales = part.scales.view(torch.float8_e8m0fnu)
            setattr(self, f"{name}_weight", nn.Parameter(codes, requires_grad=False))
            setattr(self, f"{name}_weight_scale", nn.Parameter(scales, requires_grad=False))


def _refusal(s: ExpertWorkload) -> str | None:
    if s.format != mxfp4.NAME:
        return "wired for mxfp4"
    if s.inner % _COLUMNS or s.width % _COLUMNS:
        return f"widths {s.width} x {s.inner} are no multiples of {_COLUMNS}"
    return on_cuda(s, (8, 0))


def _prepare(weights: ExpertWeights) -> Call:
    gate, up, down = weights.coded()
    layer = HummingLayer(joined(gate, up), down)
    upstream.prepare_humming_moe_layer(layer, {"quant_method": "mxfp4"})
    core = upstream.HummingRunnerCore(
        upstream.MoeRunnerConfig(
            num_experts=layer.num_experts,
            num_local_experts=layer.num_local_experts,
            hidden_size=layer.hidden_size,
            intermediate_size_per_partition=layer.intermediate_size_per_partition,
            params_dtype=layer.params_dtype,
            inplace=False,
        )
    )
    info, kind = (
        upstream.HummingMoeQuantInfo(layer=layer),
        upstream.get_standard_humming_moe_gemm_type(),
    )

    def call(x: Tensor, ids: Tensor, own: Tensor) -> Tensor:
        given = upstream.HummingRunnerInput(
            hidden_states=x.bfloat16().contiguous(),
            topk_weights=own,
            topk_ids=ids.int().contiguous(),
            gemm_type=kind,
        )
        made: Tensor = core.run(given, info, {}).hidden_states
        return made.to(x.dtype)

    return call


BACKEND = Backend("humming", needs("humming"), _refusal, _prepare)
