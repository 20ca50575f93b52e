"""Look up the names of SGLang that the product uses, each in its module, at each use.

`NAMES` lists them all: `upstream.RMSNorm` is `sglang.srt.layers.layernorm.RMSNorm`. A module of
SGLang is imported when one of its names is first used, because these imports are slow and, while
plugins load, circular.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

NAMES: dict[str, tuple[str, ...]] = {  # module -> names; "X as Y": used here as `upstream.Y`
    "sglang.kernels.fused_op": ("BaseFusedOp",),
    "sglang.kernels.ops.speculative.dspark.blockwise_rejection": ("make_rejection_noise",),
    "sglang.kernels.ops.speculative.dspark.dspark_schedule": ("ScheduleVerifyLensTopk",),
    "sglang.kernels.ops.speculative.dspark.dspark_verify_window": (
        "RaggedVerifyWindow",
        "ScatterCompactToStrided",
    ),
    "sglang.srt.arg_groups.choices": (
        "ATTENTION_BACKEND_CHOICES",
        "DRAFT_ATTENTION_BACKEND_CHOICES",
    ),
    "sglang.srt.arg_groups.cuda_graph_hook": ("generate_decode_cuda_graph_batch_sizes",),
    "sglang.srt.arg_groups.model_override_base": (
        "_declaration_overlay",
        "record_of",
        "ResolvedView",
        "ResolvingConfig",
    ),
    "sglang.srt.arg_groups.overrides": (
        "declare_resolution",
        "model_config_of",
        "resolving_view",
    ),
    "sglang.srt.configs.hybrid_arch": ("hybrid_gdn_config", "mambaish_config"),
    "sglang.srt.configs.model_config": ("is_minimax_sparse",),
    "sglang.srt.debug_utils.dumper": ("dumper",),
    "sglang.srt.distributed.communication_op": ("tensor_model_parallel_all_reduce",),
    "sglang.srt.entrypoints.ollama.protocol": (
        "OllamaChatResponse",
        "OllamaGenerateResponse",
    ),
    "sglang.srt.entrypoints.warmup": ("warmup as register_warm_up",),
    "sglang.srt.environ": ("envs",),
    "sglang.srt.eplb.expert_distribution": (
        "_ExpertDistributionRecorderNoop",
        "get_global_expert_distribution_recorder",
    ),
    "sglang.srt.layers.activation": ("SiluAndMul",),
    "sglang.srt.layers.attention.attention_registry": ("register_attention_backend",),
    "sglang.srt.layers.attention.base_attn_backend": ("AttentionBackend",),
    "sglang.srt.layers.attention.linear.gdn_backend": ("causal_conv1d_update",),
    "sglang.srt.layers.attention.linear.utils": ("select_verify_intermediate_state_indices",),
    "sglang.srt.layers.aux_hidden_states": ("AuxHiddenStateList",),
    "sglang.srt.layers.layer_boundary.residual.batch": ("snapshot as residual_snapshot",),
    "sglang.srt.layers.layernorm": ("RMSNorm",),
    "sglang.srt.layers.linear": (
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        "RowParallelLinear",
    ),
    "sglang.srt.layers.logits_processor": (
        "LogitsProcessor",
        "LogitsProcessorOutput",
        "should_apply_lm_head_quant_method",
    ),
    "sglang.srt.layers.logprob_processor": ("compute_spec_logprobs",),
    "sglang.srt.layers.moe.moe_runner": ("MoeRunnerConfig",),
    "sglang.srt.layers.moe.moe_runner.humming": (
        "get_standard_humming_moe_gemm_type",
        "HummingMoeQuantInfo",
        "HummingRunnerCore",
        "HummingRunnerInput",
    ),
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe": ("fused_moe",),
    "sglang.srt.layers.moe.topk": ("StandardTopKOutput",),
    "sglang.srt.layers.quantization.humming_utils": ("prepare_humming_moe_layer",),
    "sglang.srt.layers.quantization.unquant": (
        "UnquantizedEmbeddingMethod",
        "UnquantizedLinearMethod",
    ),
    "sglang.srt.layers.radix_attention": (
        "AttentionType",
        "RadixAttention",
    ),
    "sglang.srt.layers.rotary_embedding.base": ("RotaryEmbedding",),
    "sglang.srt.layers.rotary_embedding.rope_variant": ("Llama3RotaryEmbedding",),
    "sglang.srt.layers.rotary_embedding.yarn": ("YaRNScalingRotaryEmbedding",),
    "sglang.srt.layers.vocab_parallel_embedding": (
        "ParallelLMHead",
        "VocabParallelEmbedding",
    ),
    "sglang.srt.lora.layers": ("unwrap_lora_layer",),
    "sglang.srt.managers.io_struct": (
        "GenerateReqInput",
        "msgpack_decode",
        "msgpack_encode",
        "SessionParams",
    ),
    "sglang.srt.managers.schedule_batch": ("FINISH_ABORT",),
    "sglang.srt.managers.utils": ("GenerationBatchResult",),
    "sglang.srt.mem_cache.allocation": ("get_last_loc_torch",),
    "sglang.srt.mem_cache.allocation_sizing": ("get_alloc_reserve_per_decode",),
    "sglang.srt.mem_cache.kv_loc_plan": ("IdSpaceKind",),
    "sglang.srt.mem_cache.memory_pool": (
        "KVWriteLoc",
        "MHATokenToKVPool",
    ),
    "sglang.srt.mem_cache.swa_memory_pool": ("SWAKVPool",),
    "sglang.srt.model_executor.cuda_graph_config": (
        "Backend",
        "Phase",
        "with_phase",
    ),
    "sglang.srt.model_executor.forward_batch_info": (
        "CaptureHiddenMode",
        "ForwardBatch",
        "ForwardMode",
    ),
    "sglang.srt.model_executor.forward_context": (
        "forward_context",
        "get_attn_backend",
        "get_forward_context",
        "get_req_to_token_pool",
        "get_token_to_kv_pool",
    ),
    "sglang.srt.model_executor.model_runner": (
        "get_global_dwdp_manager",
        "get_global_experts_capturer",
        "get_global_indexer_capturer",
    ),
    "sglang.srt.model_executor.runner.eager_runner": ("EagerRunner",),
    "sglang.srt.models.dflash": (
        "DFlashAttention",
        "DFlashDecoderLayer",
        "DFlashDraftModel",
        "DFlashMLP",
    ),
    "sglang.srt.models.dspark": (
        "DSparkConfidenceHead",
        "DSparkDraftMixin",
        "DSparkDraftModel",
        "GatedMarkovHead",
        "project_through_lm_head",
        "RNNHead",
        "VanillaMarkov",
    ),
    "sglang.srt.models.llama": (
        "LlamaAttention",
        "LlamaDecoderLayer",
        "LlamaForCausalLM",
        "LlamaMLP",
        "LlamaModel",
    ),
    "sglang.srt.models.llama_eagle": (
        "LlamaDecoderLayer as EagleDecoderLayer",
        "LlamaForCausalLMEagle",
        "LlamaModel as EagleLlamaModel",
    ),
    "sglang.srt.models.llama_eagle3": ("LlamaForCausalLMEagle3",),
    "sglang.srt.models.qwen2": (
        "Qwen2Attention",
        "Qwen2DecoderLayer",
        "Qwen2ForCausalLM",
        "Qwen2MLP",
        "Qwen2Model",
    ),
    "sglang.srt.models.qwen3": (
        "Qwen3Attention",
        "Qwen3DecoderLayer",
        "Qwen3ForCausalLM",
        "Qwen3Model",
    ),
    "sglang.srt.platforms": ("current_platform",),
    "sglang.srt.platforms.cpu": ("CpuDeviceMixin",),
    "sglang.srt.platforms.device_mixin": ("PlatformEnum",),
    "sglang.srt.platforms.interface": ("SRTPlatform",),
    "sglang.srt.plugins": ("load_plugins",),
    "sglang.srt.plugins.hook_registry": (
        "HookRegistry",
        "HookType",
    ),
    "sglang.srt.runtime_context": (
        "get_exec",
        "get_observability",
        "get_parallel",
        "get_schedule",
        "get_serving",
        "get_spec",
    ),
    "sglang.srt.sampling.custom_logit_processor": (
        "CustomLogitProcessor",
        "DisallowedTokensLogitsProcessor",
    ),
    "sglang.srt.sampling.penaltylib.repetition_penalty": ("apply_scaling_penalties",),
    "sglang.srt.sampling.sampling_batch_info": ("SamplingBatchInfo",),
    "sglang.srt.sampling.sampling_params": ("TOP_K_ALL",),
    "sglang.srt.server_args": ("prepare_server_args",),
    "sglang.srt.speculative.dflash_info": ("DFlashVerifyInput",),
    "sglang.srt.speculative.draft_worker_common": (
        "make_draft_block_spec_info",
        "make_draft_input_v2",
    ),
    "sglang.srt.speculative.dspark_components.dspark_config": (
        "checkpoint_bundles_dspark_draft",
        "DSparkDraftConfig",
    ),
    "sglang.srt.speculative.dspark_components.dspark_draft": (
        "_draft_step",
        "DraftBlockResult",
        "DraftProposal",
        "make_next_draft_input",
        "resolve_draft_params",
        "resolve_greedy_mask",
        "sample_draft_block",
        "step_logits_width",
    ),
    "sglang.srt.speculative.dspark_components.dspark_observability": ("InfoSegment",),
    "sglang.srt.speculative.dspark_components.dspark_planner": (
        "alloc_verify_window",
        "apply_logits_adjustments_strided",
        "compute_verify_token_budget",
        "DSparkScheduleConfig",
        "ragged_capture_max_slots",
        "ragged_capture_num_tokens",
    ),
    "sglang.srt.speculative.dspark_components.dspark_sps": ("profile_sps_table",),
    "sglang.srt.speculative.dspark_components.dspark_verify": (
        "AcceptOuts",
        "build_accept_outs",
        "verify_logits_adjustments_are_noop",
    ),
    "sglang.srt.speculative.dspark_components.dspark_worker_v2": ("DSparkWorkerV2",),
    "sglang.srt.speculative.eagle_worker_common": ("build_eagle_verify_input",),
    "sglang.srt.speculative.ragged_verify": (
        "RaggedVerifyLayout",
        "RaggedVerifyMode",
        "read_ragged_verify_mode",
    ),
    "sglang.srt.speculative.spec_info": ("SpeculativeAlgorithm",),
    "sglang.srt.speculative.spec_sampling_mask": ("SpeculativeSamplingMaskCapture",),
    "sglang.srt.speculative.spec_tp_sync": ("SpecTpSyncSite",),
    "sglang.srt.speculative.spec_utils": (
        "build_grammar_vocab_mask",
        "GrammarTree",
        "prepare_mamba_track_for_verify",
    ),
    "sglang.srt.utils.async_probe": ("sanitize_nan_logits",),
    "sglang.srt.utils.common": (
        "async_d2h",
        "async_h2d",
        "get_cpu_ids_by_node",
    ),
    "sglang.srt.utils.network": ("NetworkAddress",),
}
MODULES = {
    # Our hook of `_handle_dspark` replaces a global of it during a call.
    "speculative_hook": "sglang.srt.arg_groups.speculative_hook",
}


def _places() -> dict[str, tuple[str, str]]:
    """Return each name's definition: name used here -> (module, name there)."""
    found: dict[str, tuple[str, str]] = {}
    for module, names in NAMES.items():
        for text in names:
            there, _, here = text.partition(" as ")
            found[here or there] = (module, there)
    return found


PLACES = _places()


def __getattr__(name: str) -> Any:
    """Return the object that SGLang's module now has under this name.

    Nothing is cached here: hooks rebind functions after their modules are loaded, and tests patch
    them. A look-up costs less than the import statement in a function that it replaces.
    Raises AttributeError for a name that no table has, or that SGLang no longer has.
    """
    if name in MODULES:
        return import_module(MODULES[name])
    if name not in PLACES:
        raise AttributeError(f"sglang_dspark.serving.upstream has no {name}")
    path, there = PLACES[name]
    module = sys.modules.get(path)
    if module is not None and there in module.__dict__:
        return module.__dict__[there]
    # The module is not loaded, is still loading in another thread, or computes the name.
    module = import_module(path)
    try:
        return getattr(module, there)
    except AttributeError:
        raise AttributeError(
            f"SGLang has no {path}.{there} any more; run `dspark doctor`"
        ) from None


def other_class(what: str, value: object, *kinds: type) -> str | None:
    """Describe an object whose class is none of `kinds`; None if it is one of them.

    For fast paths, which are written for exactly these classes: a subclass may compute another
    result. what: the value's name in the line, for example `its head`.
    """
    found = type(value)
    if found in kinds:
        return None
    expected = " or ".join(kind.__name__ for kind in kinds)
    return f"{what} is {found.__module__}.{found.__qualname__}, not {expected}"
