"""Drafters with a reduced vocabulary draft over it only, and greedy batches draw no noise.

The hooks: `sglang_dspark/serving/cpu/draft_vocabulary.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving.cpu import draft_vocabulary

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
    Seam(
        name="cpu-draft-base-logits",
        target="sglang.srt.models.dspark.DSparkDraftMixin.compute_base_logits",
        kind="around",
        hook=draft_vocabulary.compute_base_logits,
        signature="(self, hidden)",
        why="base logits of tokens that are never drafted cost as much as a target LM head",
        device="cpu",
    ),
    Seam(
        name="cpu-draft-block",
        target="sglang.srt.speculative.dspark_components.dspark_draft.sample_draft_block",
        kind="around",
        hook=draft_vocabulary.sample_draft_block,
        signature=(
            "(*, base_logits, anchor_tokens, draft_hidden, sampling_info, markov_head, noise, "
            "device, tp_sync, greedy_draft)"
        ),
        why="upstream draws noise over the whole vocabulary for greedy requests too",
        device="cpu",
    ),
)
