"""Run one pass of a model outside SGLang's runner: embedding, plan, layers.

Adapts the code around the layers in `ModelRunner.forward`, `EagerRunner._execute_extend`,
`LlamaForCausalLM.forward` and `LogitsProcessor.forward` (sglang/srt/model_executor/model_runner.py,
runner/eager_runner.py, models/llama.py, layers/logits_processor.py). They check dozens of
conditions that never change in a server. Here those are checked once a runner
(`require_plain_runner`, `require_plain_target`), and the others in every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import packed_weights
from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.cpu.fast_paths import log_off, require, require_class, supported
from sglang_dspark.backends.cpu.layers import layer_spec, layer_stack
from sglang_dspark.backends.cpu.layers.layer_spec import LayerSpec
from sglang_dspark.serving import upstream

_PLAIN = "dspark_plain"  # attribute of a runner: (its model and parts, whether they are plain)
OPTIONAL_HOOKS = (  # optional parts of a runner that act in a pass
    "canary_manager",
    "decode_cuda_graph_runner",
    "device_timer",
    "eplb_manager",
    "hisparse_coordinator",
    "lora_manager",
    "msprobe_debugger",
    "prefill_cuda_graph_runner",
)


@dataclass(frozen=True)
class Window:
    """The fields of SGLang's `ForwardBatch` that a draft block or verify pass reads.

    input_ids, positions, out_cache_loc: [n] int64. req_pool_indices, seq_lens: [R], the lengths
    before the windows. spec_info: contains the length of each window.
    """

    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    spec_info: Any
    forward_mode: Any = upstream.ForwardMode.TARGET_VERIFY


def supports_pass(
    runner: Any, require_model: Callable[[Any], None], parts: tuple[Any, ...]
) -> bool:
    """Return whether this pass of a runner consists of only the model's layers.

    require_model: of the model; called again when one of its `parts` was replaced. Profilers and
    parts of the runner attached since the start are checked each time.
    """
    path, checked = f"fast passes of {type(runner.model).__name__}", (runner.model, *parts)
    found = runner.__dict__.get(_PLAIN)
    if found is None or found[0] != checked:
        plain = supported(path, lambda: require_plain_runner(runner, require_model))
        found = runner.__dict__[_PLAIN] = (checked, plain)
    profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    if not found[1] or profiled or torch.is_grad_enabled():
        return False
    for hook in OPTIONAL_HOOKS:
        part = getattr(runner, hook)
        # A graph runner's attribute may be an `EagerRunner`, which has no graph.
        why = part is not None and upstream.other_class(f"its {hook}", part, upstream.EagerRunner)
        if why:
            log_off(path, why)
            return False
    return True


def require_plain_runner(runner: Any, require_model: Callable[[Any], None]) -> None:
    """Require that a runner's passes are one unobserved eager forward of one rank's plain model.

    Raises UnsupportedError where they are not, as the other functions here do.
    """
    parallel, model, backend = upstream.get_parallel(), runner.model, runner.attn_backend
    recorder = upstream.get_global_expert_distribution_recorder()
    observers = (
        upstream.get_global_experts_capturer(),
        upstream.get_global_indexer_capturer(),
        upstream.get_global_dwdp_manager(),
    )
    require(parallel.tp_size == parallel.pp_size == 1, "several ranks take part in a pass")
    require(not runner.enable_elastic_ep, "experts move between ranks")
    require_class("its eager runner", runner.eager_runner, upstream.EagerRunner)
    require(not runner.eager_runner.enable_pdmux, "prefill and decode share its passes")
    require_class("its attention backend", backend, DsparkCpuAttnBackend)
    require_class("the recorder of experts", recorder, upstream._ExpertDistributionRecorderNoop)
    require(all(each is None for each in observers), "SGLang captures what its passes compute")
    require(not upstream.dumper.may_enable, "SGLang's dumper is on")
    for name in ("prepare_for_forward", "prepare_forward_batch"):
        require(not hasattr(model, name), f"{type(model).__name__} has a {name}")
    space = runner.kv_index_translator.space(upstream.IdSpaceKind.FULL)
    require(space is not None and space.write is None, "cache slots are translated")
    require_model(model)


def require_plain_target(model: Any) -> None:
    """Require a target that is only layers, last norm and product with the LM head."""
    inner = {
        upstream.LlamaForCausalLM: upstream.LlamaModel,
        upstream.Qwen2ForCausalLM: upstream.Qwen2Model,
        upstream.Qwen3ForCausalLM: upstream.Qwen3Model,
    }
    require_class("the target", model, *inner)
    require_class("its model", getattr(model, "model", None), inner[type(model)])
    processor = model.logits_processor
    require_class("its logits processor", processor, upstream.LogitsProcessor)
    hooks = layer_spec.hooked(model.model) or layer_spec.hooked(processor)
    require(not hooks, "a module has hooks")
    require_plain_embedding(model.model.embed_tokens)
    require(processor.logit_scale is None, "its logits are scaled")
    require(not processor.final_logit_softcapping, "its logits are capped")
    require(processor.rl_on_policy_target is None, "its logits are those of a policy in training")
    require(processor.expected_aux_hidden_states is None, "its hidden states are asked for")
    require(not processor.keep_last_hidden_states, "its last hidden states are kept")
    head = model.lm_head
    require(not packed_weights.is_quantised(head), "its LM head is quantised")
    require(not getattr(head, "use_intel_amx_backend", False), "its LM head is packed for AMX")
    whole = head.weight.shape[0] == processor.vocab_size
    require(whole, "its LM head is not as long as the vocabulary")


def require_plain_embedding(embedding: Any) -> None:
    """Require that embeddings are rows of a float32 weight, or of one packed here."""
    kinds = (upstream.VocabParallelEmbedding, upstream.ParallelLMHead)
    require_class("its embedding", embedding, *kinds)
    methods = (packed_weights.EmbeddingMethod, upstream.UnquantizedEmbeddingMethod)
    require_class("the method of its embedding", embedding.quant_method, *methods)
    dtype = embedding.weight.dtype
    known = dtype is torch.float32 or packed_weights.holds(embedding)
    require(known, f"its embedding is {dtype}, not torch.float32")
    require(not layer_spec.hooked(embedding), "its embedding has hooks")


def run(
    runner: Any,
    model: Any,
    layer_of: Callable[[Any], LayerSpec],
    window: Window,
    captured: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]] | None:
    """Run embedding, layers and last norm of a window: normed [n, d], captures [n, d] each.

    model: whose `layers` are resolved by `layer_of`. None where the compiled layers do not support
    the pass; then no data is written, and the runner's own forward plans attention again.
    """
    stack, backend = layer_stack.stack_of_model(model, layer_of), runner.attn_backend
    if stack is None:
        return None
    embedding = model.embed_tokens
    hidden = embedding.quant_method.embedding(embedding, window.input_ids)  # [n, d]
    backend.init_forward_metadata(window)
    done = layer_stack.run(stack, backend, window.positions, hidden, window, captured)
    runner.forward_pass_id += done is not None
    return done
