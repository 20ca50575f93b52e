"""Serve gated delta rule layers (GDN: Qwen3.5) without AMX, for which upstream has no norm.

Upstream: sglang/kernels/ops/attention/fla/layernorm_gated.py uses `sgl_kernel` where the processor
has AMX, and Triton elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from sglang_dspark.backends.cpu.delta_rule import fused_rmsnorm_gated_cpu
from sglang_dspark.patches.seam import Seams

SEAMS = Seams(device="cpu")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of upstream's kernel
    "swish": silu,
    "silu": silu,
    "sigmoid": torch.sigmoid,
}


@SEAMS.replace(
    "cpu-gated-norm",
    "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward",
    why="without AMX upstream's norm of delta rule layers is a Triton kernel",
)
def gated_norm(self: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    """Return rms_norm(x) * weight * activation(z) (REPLACE of `RMSNorm.forward`).

    Raises ValueError for other norms of upstream's class, which Qwen3.5 does not have.
    """
    if z is None or self.group_size is not None or not self.norm_before_gate:
        raise ValueError("on a CPU a gated norm has a gate, no groups, and norms before its gate")
    return fused_rmsnorm_gated_cpu(x, self.weight, z, self.eps, _ACTIVATIONS[self.activation])
