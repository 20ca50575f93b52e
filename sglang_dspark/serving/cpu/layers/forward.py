"""One short pass of a model outside SGLang's runner: embedding, plan, layers, head.

Adapts what stands around the layers in `ModelRunner.forward`, `EagerRunner._execute_extend`,
`LlamaForCausalLM.forward` and `LogitsProcessor.forward` (sglang/srt/model_executor/model_runner.py,
runner/eager_runner.py, models/llama.py, layers/logits_processor.py, 0.5.23). All of them ask dozens
of questions whose answers never change in a server; here they are asked once a runner
(`plain_runner`, `plain_target`), and what can change is asked in every pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor, nn

from sglang_dspark.serving.cpu import linear
from sglang_dspark.serving.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.serving.cpu.layers import model as layer_model
from sglang_dspark.serving.cpu.layers.model import LayerStack

_PLAIN = "dspark_plain"  # attribute of a runner: (its model, the answer)
OPTIONAL_HOOKS = (  # parts of a runner that take part in a pass where they exist
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
    """What a pass of draft blocks or verify windows reads of SGLang's `ForwardBatch`.

    input_ids, positions, out_cache_loc: [n] int64. req_pool_indices, seq_lens: [R], the lengths
    before the windows. spec_info: says how long each window is.
    """

    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    spec_info: Any
    forward_mode: ForwardMode = ForwardMode.TARGET_VERIFY


def serves(runner: Any) -> bool:
    """Whether this pass of a runner is the model's layers and nothing else.

    Profilers that want SGLang's spans and parts attached since the start are asked for each time.
    """
    found = runner.__dict__.get(_PLAIN)
    if found is None or found[0] is not runner.model:
        found = runner.__dict__[_PLAIN] = (runner.model, plain_runner(runner))
    return (
        found[1]
        and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        and not torch.is_grad_enabled()
        and all(hook is None or idle(hook) for hook in _optional_hooks(runner))
    )


def idle(hook: Any) -> bool:
    """An `EagerRunner` in the place of a graph runner: it holds no graph."""
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    return type(hook) is EagerRunner


def plain_runner(runner: Any) -> bool:
    """Whether a runner's passes are one eager forward of one rank, observed by nobody."""
    from sglang.srt.debug_utils.dumper import dumper
    from sglang.srt.eplb.expert_distribution import (
        _ExpertDistributionRecorderNoop,
        get_global_expert_distribution_recorder,
    )
    from sglang.srt.model_executor import model_runner
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner
    from sglang.srt.runtime_context import get_parallel

    parallel, model, backend = get_parallel(), runner.model, runner.attn_backend
    return (
        parallel.tp_size == parallel.pp_size == 1
        and runner.is_generation
        and not runner.enable_elastic_ep
        and type(runner.eager_runner) is EagerRunner
        and not runner.eager_runner.enable_pdmux
        and type(backend) is DsparkCpuAttnBackend
        and type(get_global_expert_distribution_recorder()) is _ExpertDistributionRecorderNoop
        and model_runner.get_global_experts_capturer() is None
        and model_runner.get_global_indexer_capturer() is None
        and model_runner.get_global_dwdp_manager() is None
        and not dumper.may_enable
        and not hasattr(model, "prepare_for_forward")
        and not hasattr(model, "prepare_forward_batch")
        and _passes_ids_through(runner)
    )


def _passes_ids_through(runner: Any) -> bool:
    """Whether cache slots are used as the scheduler names them."""
    from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind

    space = runner.kv_index_translator.space(IdSpaceKind.FULL)
    return space is not None and space.write is None


def plain_target(model: Any) -> bool:
    """Whether a target is layers, last norm, product with the LM head, and nothing behind it."""
    from sglang.srt.layers.logits_processor import (
        LogitsProcessor,
        should_apply_lm_head_quant_method,
    )
    from sglang.srt.models.llama import LlamaForCausalLM, LlamaModel

    if type(model) is not LlamaForCausalLM or type(model.model) is not LlamaModel:
        return False
    processor, head = model.logits_processor, model.lm_head
    return (
        type(processor) is LogitsProcessor
        and not any(hooked(module) for module in (model.model, processor))
        and plain_embedding(model.model.embed_tokens)
        and processor.logit_scale is None
        and not processor.final_logit_softcapping
        and processor.rl_on_policy_target is None
        and processor.expected_aux_hidden_states is None
        and not processor.keep_last_hidden_states
        and not processor.defer_verify_gather
        and not processor.do_tensor_parallel_all_gather
        and not hasattr(head, "set_lora")
        and not should_apply_lm_head_quant_method(head, getattr(head, "quant_method", None))
        and not getattr(head, "use_intel_amx_backend", False)
        and head.weight.shape[0] == processor.vocab_size
        and linear.prepare() is not None
        and linear.eligible(head.weight.new_empty(1, head.weight.shape[1]), head.weight)
    )


def plain_embedding(embedding: Any) -> bool:
    """Whether looking tokens up is taking rows of a float32 weight."""
    from sglang.srt.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    return (
        type(embedding) in (VocabParallelEmbedding, ParallelLMHead)
        and type(embedding.quant_method) is UnquantizedEmbeddingMethod
        and embedding.tp_size == 1
        and embedding.weight.dtype is torch.float32
        and not hooked(embedding)
    )


def hooked(module: nn.Module) -> bool:
    """Whether somebody listens to a module's calls."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def run(
    runner: Any, stack: LayerStack, embedding: Any, window: Window, captured: Any = ()
) -> tuple[Tensor, list[Tensor]] | None:
    """Embedding, layers and last norm of a window: normed [n, d], captures [n, d] each.

    None where the compiled layers do not take the pass; nothing was written then, and the runner's
    own forward plans attention anew.
    """
    backend = runner.attn_backend
    hidden = embedding.weight.index_select(0, window.input_ids)  # [n, d]
    backend.init_forward_metadata(window)
    step = layer_model.step_of(stack, backend, window.positions, hidden, window)
    if step is None:
        return None
    runner.forward_pass_id += 1
    return layer_model.run(stack, step, hidden, captured)
