"""Prepare the draft model for a CPU: packed weights, our kernels, torch where upstream has Triton.

Upstream: sglang/srt/models/dspark.py (`DSparkDraftMixin`) and sglang/srt/models/dflash.py, whose
head norms and RoPE are one fused Triton kernel for bfloat16.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.backends.cpu import context_kv, draft_vocabulary, packed_weights
from sglang_dspark.patches.cpu.linear import adopt_plain_layers
from sglang_dspark.patches.seam import Seam


def prepare_draft(result: Any, draft_model: Any, *, embed_tokens: Any, lm_head: Any) -> Any:
    """AFTER hook of `attach_shared_modules`: pack the draft's weights, gather its reduced head."""
    packed_weights.pack_draft(draft_model)
    adopt_plain_layers(draft_model)
    draft_vocabulary.find_reduced_head(draft_model, lm_head)
    return result


def no_fused_norm_rope(result: None, attention: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of `DFlashAttention.__init__`: use upstream's torch head norms and RoPE."""
    attention.use_table_qk_norm_rope = False


def no_fused_write(self: Any, pool: Any) -> None:
    """REPLACE hook: return no fused write, so that the draft falls back to plain torch."""


_DRAFT = "sglang.srt.models.dspark.DSparkDraftMixin"

SEAMS = (
    Seam(
        name="cpu-draft-weights",
        target=f"{_DRAFT}.attach_shared_modules",
        kind="after",
        hook=prepare_draft,
        signature="(self, *, embed_tokens, lm_head)",
        why="a draft reads all its weights: fewer bytes, and of the heads the rows it can draft",
        device="cpu",
    ),
    Seam(
        name="cpu-context-kv",
        target=f"{_DRAFT}.write_target_hidden_kv",
        kind="around",
        hook=context_kv.write_target_hidden_kv,
        signature="(self, *, target_hidden, pool, positions, cache_loc, cache_loc_2d=None, "
        "commit_lens=None, target_hidden_is_projected=False)",
        why="upstream projects rejected rows too, through F.linear, and writes layer by layer",
        device="cpu",
    ),
    Seam(
        name="cpu-fused-kv-write",
        target=f"{_DRAFT}._build_fused_kv_write_bundle",
        kind="replace",
        hook=no_fused_write,
        signature="(self, pool)",
        why="the draft's fused context write for bfloat16 is a Triton kernel",
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
