"""Run one pass of a model outside SGLang's runner: embedding, plan, layers.

Adapts the code around the layers in `ModelRunner.forward`, `EagerRunner._execute_extend`,
`LlamaForCausalLM.forward` and `LogitsProcessor.forward` (sglang/srt/model_executor/model_runner.py,
runner/eager_runner.py, models/llama.py, layers/logits_processor.py). They check dozens of
conditions that never change in a server. Here those are checked once a runner
(`require_plain_runner`, `require_plain_target`), and the others in every pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import linear, packed_weights
from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.cpu.fast_paths import log_off, require, require_class, supported
from sglang_dspark.backends.cpu.layers import layer_stack
from sglang_dspark.backends.cpu.layers.layer_stack import LayerStack
from sglang_dspark.backends.cpu.weight_methods import EmbeddingMethod, is_quantised
from sglang_dspark.serving import upstream

_PLAIN = "dspark_plain"  # attribute of a runner: (its model, whether it is plain)
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
_optional_hooks = attrgetter(*OPTIONAL_HOOKS)


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


def supports_runner(runner: Any) -> bool:
    """Return whether this pass of a runner consists of only the model's layers.

    Profilers and parts attached since the start are checked each time.
    """
    found = runner.__dict__.get(_PLAIN)
    if found is None or found[0] is not runner.model:
        name = f"passes of {type(runner.model).__name__} around SGLang's runner"
        plain = supported(name, lambda: require_plain_runner(runner))
        found = runner.__dict__[_PLAIN] = (runner.model, plain)
    profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    if not found[1] or profiled or torch.is_grad_enabled():
        return False
    for name, hook in zip(OPTIONAL_HOOKS, _optional_hooks(runner), strict=True):
        if hook is not None and not idle(hook):
            why = upstream.other_class(f"its {name}", hook, upstream.EagerRunner)
            log_off(f"passes of {type(runner.model).__name__} around SGLang's runner", why)
            return False
    return True


def idle(hook: Any) -> bool:
    """Return whether a graph runner's attribute is an `EagerRunner`, which has no graph."""
    return type(hook) is upstream.EagerRunner


def require_plain_runner(runner: Any) -> None:
    """Require that a runner's passes are one unobserved eager forward of one rank.

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
    require(runner.is_generation, "the model generates nothing")
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
    require(not any(hooked(module) for module in (model.model, processor)), "a module has hooks")
    require_plain_embedding(model.model.embed_tokens)
    require(processor.logit_scale is None, "its logits are scaled")
    require(not processor.final_logit_softcapping, "its logits are capped")
    require(processor.rl_on_policy_target is None, "its logits are those of a policy in training")
    require(processor.expected_aux_hidden_states is None, "its hidden states are asked for")
    require(not processor.keep_last_hidden_states, "its last hidden states are kept")
    gathers = processor.defer_verify_gather or processor.do_tensor_parallel_all_gather
    require(not gathers, "its logits are gathered from ranks")
    head = model.lm_head
    require(not hasattr(head, "set_lora"), "its LM head has LoRA")
    require(not is_quantised(head), "its LM head is quantised")
    require(not getattr(head, "use_intel_amx_backend", False), "its LM head is packed for AMX")
    whole = head.weight.shape[0] == processor.vocab_size
    require(whole, "its LM head is not as long as the vocabulary")
    require(linear.prepare() is not None, str(linear.why_not()))
    one, sizes = torch.empty(1, head.weight.shape[1]), list(head.weight.shape)
    require(
        linear.eligible(one, head.weight),
        f"its LM head is {head.weight.dtype} {sizes}, which our kernel cannot read",
    )


def require_plain_embedding(embedding: Any) -> None:
    """Require that embeddings are rows of a float32 weight, or of one packed here."""
    kinds = (upstream.VocabParallelEmbedding, upstream.ParallelLMHead)
    require_class("its embedding", embedding, *kinds)
    methods = (EmbeddingMethod, upstream.UnquantizedEmbeddingMethod)
    require_class("the method of its embedding", embedding.quant_method, *methods)
    require(embedding.tp_size == 1, f"its embedding is split over {embedding.tp_size} ranks")
    dtype = embedding.weight.dtype
    known = dtype is torch.float32 or packed_weights.holds(embedding)
    require(known, f"its embedding is {dtype}, not torch.float32")
    require(not hooked(embedding), "its embedding has hooks")


def hooked(module: nn.Module) -> bool:
    """Return whether a module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def run(
    runner: Any, stack: LayerStack, embedding: Any, window: Window, captured: Any = ()
) -> tuple[Tensor, list[Tensor]] | None:
    """Run embedding, layers and last norm of a window: normed [n, d], captures [n, d] each.

    None where the compiled layers do not support the pass; then no data is written, and the
    runner's own forward plans attention again.
    """
    backend = runner.attn_backend
    hidden = packed_weights.embedded(embedding, window.input_ids)  # [n, d]
    backend.init_forward_metadata(window)
    step = layer_stack.pass_of(stack, backend, window.positions, hidden, window)
    if step is None:
        return None
    runner.forward_pass_id += 1
    return layer_stack.run(stack, step, hidden, captured)
