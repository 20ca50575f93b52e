"""Declares an attention backend with ragged windows where the user names none.

The hook: `sglang_dspark/backends/cuda/default_attention.py`.
"""

from __future__ import annotations

from sglang_dspark.backends.cuda import default_attention
from sglang_dspark.patches.seam import Seam

SEAMS = (
    Seam(
        name="cuda-default-attention",
        target="sglang.srt.arg_groups.model_override_base.get_default_attn_backend",
        kind="around",
        hook=default_attention.choose_backend,
        signature="(server_args, use_mla_backend, model_config)",
        why="upstream's default for DSPARK off Hopper is flashinfer, which has no ragged windows",
        device="cuda",
    ),
)
