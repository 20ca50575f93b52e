"""Write the draft's context through our kernels.

The hooks: `sglang_dspark/backends/cpu/context_kv.py`.
"""

from __future__ import annotations

from sglang_dspark.backends.cpu import context_kv
from sglang_dspark.patches.seam import Seam

SEAMS = (
    Seam(
        name="cpu-context-kv",
        target="sglang.srt.models.dspark.DSparkDraftMixin.write_target_hidden_kv",
        kind="around",
        hook=context_kv.write_target_hidden_kv,
        signature="(self, *, target_hidden, pool, positions, cache_loc, cache_loc_2d=None, "
        "commit_lens=None, target_hidden_is_projected=False)",
        why="upstream projects rejected rows too, through F.linear, and writes layer by layer",
        device="cpu",
    ),
)
