"""Serve gated delta rule layers (GDN: Qwen3.5) without AMX, for which upstream has no norm.

Upstream: sglang/kernels/ops/attention/fla/layernorm_gated.py uses `sgl_kernel` where the processor
has AMX, and Triton elsewhere.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dspark.backends.cpu.delta_rule import fused_rmsnorm_gated_cpu
from sglang_dspark.patches.seam import Seams

SEAMS = Seams(device="cpu")


@SEAMS.replace(
    "cpu-gated-norm",
    "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward",
    why="without AMX upstream's norm of delta rule layers is a Triton kernel",
)
def gated_norm(self: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    """Return rms_norm(x) * weight * silu(z) (REPLACE of `RMSNorm.forward`)."""
    assert z is not None, "a delta rule layer has a gate"
    return fused_rmsnorm_gated_cpu(x, self.weight, z, self.eps)
