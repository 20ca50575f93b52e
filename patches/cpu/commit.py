"""Write the draft's context through our kernels.

The hooks: `sglang_dspark/backends/cpu/commit.py`.
"""

from __future__ import annotations

from sglang_dspark.backends.cpu import commit
from sglang_dspark.patches.seam import Seam

SEAMS = (
    Seam(
        name="cpu-context-kv",
        target="sglang.srt.models.dspark.DSparkDraftMixin.write_target_hidden_kv",
        kind="around",
        hook=commit.write_target_hidden_kv,
        signature="(self, *, target_hidden, pool, positions, cache_loc, cache_loc_2d=None, "
        "commit_lens=None, target_hidden_is_projected=False)",
        why="upstream projects rejected rows too, through F.linear, and writes layer by layer",
        device="cpu",
    ),
)
