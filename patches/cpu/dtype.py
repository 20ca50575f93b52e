"""Keeps the model's dtype for input embeddings.

Upstream: sglang/srt/model_executor/model_runner.py, `ModelRunner._extend_forward_kwargs`
casts them to bfloat16, so a float32 draft, whose block is fed as embeddings, fails on the mix.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seam


def keep_embedding_dtype(
    result: dict[str, Any], self: Any, forward_batch: Any, pp_proxy_tensors: Any
) -> dict[str, Any]:
    """AFTER hook; batches with overridden rows are built from the result and stay as they are."""
    if "input_embeds" in result and forward_batch.replace_embeds is None:
        result["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
    return result


SEAMS = (
    Seam(
        name="cpu-embedding-dtype",
        target="sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        kind="after",
        hook=keep_embedding_dtype,
        signature="(self, forward_batch, pp_proxy_tensors)",
        why="upstream casts input embeddings to bfloat16 whatever the model's dtype",
        device="cpu",
    ),
)
