"""Draft models on CPU: the fused Triton paths off, plain torch instead.

Upstream (0.5.23): models/dspark.py writes the context's keys and values with a fused kernel and
models/dflash.py applies head norms and RoPE with another; both are for bfloat16 on a GPU.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seam


def no_fused_kv_write(model: Any, pool: Any) -> None:
    """REPLACE hook of `_build_fused_kv_write_bundle`: the plain path writes layer by layer."""
    return None


def no_fused_norm_rope(result: None, attention: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of `DFlashAttention.__init__`."""
    attention.use_table_qk_norm_rope = False


SEAMS = (
    Seam(
        name="cpu-draft-kv-write",
        target="sglang.srt.models.dspark.DSparkDraftMixin._build_fused_kv_write_bundle",
        kind="replace",
        hook=no_fused_kv_write,
        signature="(self, pool)",
        why="in bfloat16 the draft's context keys are written by a Triton kernel",
        device="cpu",
    ),
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
