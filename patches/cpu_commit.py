"""Greedy accept and context injection of a DSPARK step through our kernels.

The hooks: `sglang_dspark/serving/cpu/commit.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving.cpu import commit

SEAMS = (
    Seam(
        name="cpu-accept-greedy",
        target="sglang.kernels.ops.speculative.dspark.dspark_accept.accept_greedy",
        kind="around",
        hook=commit.accept_greedy,
        signature="(*, candidates, target_logits, verify_num_draft_tokens, "
        "cutoff_verify_lens=None, fused_argmax=False)",
        why="torch.argmax over every row of every window, ten more calls to count agreements",
        device="cpu",
    ),
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
