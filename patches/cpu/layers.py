"""Compute decoder layers of Llama and Qwen3 targets and of DSPARK drafts by a few kernel calls."""

from __future__ import annotations

from sglang_dspark.backends.cpu.layers import layer_stack
from sglang_dspark.patches.seam import Seam

SEAMS = (
    Seam(
        name="cpu-layers-target",
        target="sglang.srt.models.llama.LlamaModel.forward",
        kind="around",
        hook=layer_stack.forward_target,
        signature="(self, input_ids, positions, forward_batch, input_embeds=None, "
        "pp_proxy_tensors=None)",
        why="SGLang's Python around a small layer's kernels costs as much as their arithmetic",
        device="cpu",
    ),
    Seam(
        name="cpu-layers-qwen3",
        target="sglang.srt.models.qwen3.Qwen3Model.forward",
        kind="around",
        hook=layer_stack.forward_target,
        signature="(self, input_ids, positions, forward_batch, input_embeds=None, "
        "pp_proxy_tensors=None)",
        why="the same around the layers of Qwen3",
        device="cpu",
    ),
    Seam(
        name="cpu-layers-draft",
        target="sglang.srt.models.dflash.DFlashDraftModel.forward",
        kind="around",
        hook=layer_stack.forward_draft,
        signature="(self, input_ids, positions, forward_batch, input_embeds=None, "
        "get_embedding=False, pp_proxy_tensors=None)",
        why="the same around the draft's layers",
        device="cpu",
    ),
)
