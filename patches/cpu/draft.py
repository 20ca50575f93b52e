"""Draft models on CPU: head norms and RoPE in plain torch.

Upstream: sglang/srt/models/dflash.py has a fused Triton kernel for bfloat16.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seam


def no_fused_norm_rope(result: None, attention: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of `DFlashAttention.__init__`."""
    attention.use_table_qk_norm_rope = False


SEAMS = (
    Seam(
        name="cpu-draft-norm-rope",
        target="sglang.srt.models.dflash.DFlashAttention.__init__",
        kind="after",
        hook=no_fused_norm_rope,
        signature="(self, config, layer_id, quant_config=None, prefix='')",
        why="in bfloat16 the draft's head norms and RoPE are a Triton kernel",
        device="cpu",
    ),
)
