"""Prepare a drafter when its weights are loaded.

The hooks: `sglang_dspark/backends/cpu/draft_vocabulary.py`.
"""

from __future__ import annotations

from sglang_dspark.backends.cpu import draft_vocabulary
from sglang_dspark.patches.seam import Seam

SEAMS = (
    Seam(
        name="cpu-draft-weights",
        target="sglang.srt.models.dspark.DSparkDraftMixin.attach_shared_modules",
        kind="after",
        hook=draft_vocabulary.prepare_draft,
        signature="(self, *, embed_tokens, lm_head)",
        why="a draft reads all its weights: fewer bytes, and of the heads the rows it can draft",
        device="cpu",
    ),
)
