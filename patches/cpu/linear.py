"""Matrix products of served models through our kernel for few rows (backends/cpu/linear.py).

The hooks: `sglang_dspark/backends/cpu/linear_layers.py`.
"""

from __future__ import annotations

from sglang_dspark.backends.cpu import linear_layers, packed_weights
from sglang_dspark.patches.seam import Seam

_UNQUANTIZED = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod"

SEAMS = (
    Seam(
        name="cpu-packed-target",
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        kind="after",
        hook=packed_weights.pack_target,
        signature="(self)",
        why="a decode step reads every weight: in bfloat16 or int8 it reads fewer bytes",
        device="cpu",
    ),
    Seam(
        name="cpu-packed-embedding",
        target="sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod.embedding",
        kind="around",
        hook=linear_layers.embed,
        signature="(self, layer, input_)",
        why="rows of a packed embedding are float32 again when they are looked up",
        device="cpu",
    ),
    Seam(
        name="cpu-linear-compile",
        target=f"{_UNQUANTIZED}.process_weights_after_loading",
        kind="after",
        hook=linear_layers.compile_at_load,
        signature="(self, layer)",
        why="compiling the kernel belongs to loading, not to the first request",
        device="cpu",
    ),
    Seam(
        name="cpu-linear",
        target=f"{_UNQUANTIZED}.apply",
        kind="around",
        hook=linear_layers.apply_linear,
        signature="(self, layer, x, bias=None)",
        why="F.linear takes twice our time for one row, three times for the 6 of a verify step",
        device="cpu",
    ),
    Seam(
        name="cpu-linear-lm-head",
        target="sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        kind="around",
        hook=linear_layers.compute_lm_head,
        signature="(self, hidden_states, lm_head, embedding_bias=None, *, out=None)",
        why="the LM head is a fifth of the demo target's weights and is multiplied without a layer",
        device="cpu",
    ),
    Seam(
        name="cpu-linear-draft-head",
        target="sglang.srt.models.dspark.project_through_lm_head",
        kind="around",
        hook=linear_layers.project_through_lm_head,
        signature="(hidden, lm_head)",
        why="the draft's base logits take the target's LM head with gamma rows a request",
        device="cpu",
    ),
)
