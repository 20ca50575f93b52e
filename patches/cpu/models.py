"""Put our kernels into a model once its weights are loaded: layers, products, look-ups, context.

Upstream: `ModelRunner.load_model` (sglang/srt/model_executor/model_runner.py) returns a model
whose modules have an unquantised method each (layers/quantization/unquant.py) and their own
forwards (models/{llama,llama_eagle,qwen2,qwen3,dflash,dspark}.py). The replacements on the
instances call those for inputs that our kernels do not support.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_dspark.patches.cpu.mtp import forward_model
from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream

SEAMS = Seams(device="cpu")


@SEAMS.after(
    "cpu-model",
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
    signature="(self)",
    why="a step reads every weight, and SGLang's Python around a small layer's kernels costs "
    "as much as their arithmetic",
)
def prepare_model(result: Any, runner: Any, *, fast: bool = True) -> Any:
    """Pack the weights and use our operators (AFTER hook of `load_model`).

    fast: False for only the operators that a CPU lacks, without fast paths of passes and drafts.
    """
    from sglang_dspark.backends.cpu import linear, packed_weights

    model = runner.model
    for module in model.modules():  # draft models have Triton kernels for bfloat16
        if isinstance(module, upstream.DFlashAttention):
            module.use_table_qk_norm_rope = False
    if isinstance(model, upstream.DSparkDraftMixin):
        model._build_fused_kv_write_bundle = lambda pool: None
    linear.prepare()  # may compile: now, not during the first request
    packed_weights.pack_target(runner)
    if fast:
        _use_fast_paths(model)
    packed_weights.adopt(model)
    return result


def _use_fast_paths(model: Any) -> None:
    """Compute layers by a few kernel calls; write a draft's context by one call."""
    from sglang_dspark.backends.cpu import context_kv, packed_weights
    from sglang_dspark.backends.cpu.layers import layer_stack

    forwards: dict[Any, Any] = {
        upstream.LlamaModel.forward: layer_stack.forward_target,
        upstream.Qwen2Model.forward: layer_stack.forward_target,
        upstream.Qwen3Model.forward: layer_stack.forward_target,
        upstream.DFlashDraftModel.forward: layer_stack.forward_draft,
        upstream.EagleLlamaModel.forward: forward_model,
    }
    for module in model.modules():
        theirs = type(module).forward
        if theirs in forwards:
            module.forward = partial(forwards[theirs], theirs, module)
    if isinstance(model, upstream.DSparkDraftMixin):
        packed_weights.pack_draft(model)
        packed_weights.adopt_plain_layers(model, shared=("embed_tokens", "lm_head"))
        write = type(model).write_target_hidden_kv
        model.write_target_hidden_kv = partial(context_kv.write_target_hidden_kv, write, model)
