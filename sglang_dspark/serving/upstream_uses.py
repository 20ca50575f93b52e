"""List the attributes and function bodies of SGLang that we rely on, for upstream_check.py.

Both are read in SGLang's source. `python -m tools.upstream_hashes` prints the entries of
`REIMPLEMENTED` that differ from the installed SGLang.
"""

from __future__ import annotations

# Module -> class -> attributes and methods that we read, set or call on its instances: all private
# ones, and those of the step. Under "": those that the module sets on, or reads from, objects.
ATTRIBUTES: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang.srt.arg_groups.cuda_graph_hook": {
        "": ("_cuda_graph_config_locked",),
    },
    "sglang.srt.arg_groups.pipeline": {
        "": ("_raw_input",),
    },
    "sglang.srt.entrypoints.anthropic.serving": {
        "AnthropicServing": ("_convert_response",),
    },
    "sglang.srt.entrypoints.ollama.serving": {
        "OllamaServing": ("_get_timestamp",),
    },
    "sglang.srt.entrypoints.openai.protocol": {
        "ChatCompletionRequest": (
            "_response_parser_grammar_start",
            "_response_parser_tool_grammar",
        ),
    },
    "sglang.srt.entrypoints.openai.serving_chat": {
        "OpenAIServingChat": (
            "_encoding_output",
            "_generate_chat_stream",
            "_tool_call_parsing_active",
        ),
    },
    "sglang.srt.layers.logits_processor": {
        "LogitsProcessor": ("_compute_lm_head",),
    },
    "sglang.srt.layers.sampler": {
        "Sampler": ("_sample_from_probs",),
    },
    "sglang.srt.mem_cache.memory_pool": {
        "MHATokenToKVPool": (
            "_store_kv_layer",
            "set_kv_buffer",
        ),
    },
    "sglang.srt.model_executor.model_runner": {
        "ModelRunner": (
            "canary_manager",
            "decode_cuda_graph_runner",
            "device_timer",
            "eager_runner",
            "enable_elastic_ep",
            "eplb_manager",
            "forward_pass_id",
            "hisparse_coordinator",
            "kv_index_translator",
            "lora_manager",
            "msprobe_debugger",
            "prefill_cuda_graph_runner",
        ),
    },
    "sglang.srt.model_executor.model_runner_components.weight_updater": {
        "": ("_derived_weight_cache_error",),
    },
    "sglang.srt.models.dspark": {
        "DSparkDraftMixin": (
            "_build_fused_kv_write_bundle",
            "_fused_kv_write_bundle",
            "_fused_kv_write_cache",
            "_stacked_ctx_kv_cache",
            "_stacked_ctx_kv_params",
            "write_target_hidden_kv",
        ),
    },
    "sglang.srt.server_args": {
        "": ("_launch_command",),
    },
    "sglang.srt.speculative.base_spec_worker": {
        "BaseSpecWorker": ("target_worker",),
        "EagleDraftWorkerBase": (
            "_topk1_parents_prealloc",
            "_topk1_score_indices_prealloc",
        ),
    },
    "sglang.srt.speculative.dspark_components.dspark_draft": {
        "DraftBlockProposer": (
            "_draft_block_ids_buf",
            "_draft_block_spec_info",
            "_draft_sampler",
            "_run_forward",
            "draft_block_ids_view",
            "noise",
            "propose",
        ),
    },
    "sglang.srt.speculative.dspark_components.dspark_kv_inject": {
        "TargetHiddenKvInjector": (
            "draft_model",
            "draft_model_runner",
            "ids_for",
            "inject_target_hidden",
            "swa_ring_size",
        ),
    },
    "sglang.srt.speculative.dspark_components.dspark_observability": {
        "DsparkStepObservers": (
            "_block_accept_recorder",
            "_info_dumper",
            "segment",
        ),
    },
    "sglang.srt.speculative.dspark_components.dspark_planner": {
        "DSparkVerifyPlanner": (
            "_budget_planner",
            "_confidence_head",
            "_is_verify_all",
            "_ragged_verify_mode",
            "draft_model",
            "is_compact_mode",
            "mode_value",
        ),
    },
    "sglang.srt.speculative.dspark_components.dspark_verify": {
        "TargetVerifyExecutor": (
            "_run_ragged",
            "_rejection_noise",
            "_tp_sync",
            "accept_and_finalize",
            "commit_hidden",
            "target_worker",
            "verify_epilogue",
        ),
        "DsparkVerifyEpilogue": (
            "_tp_sync",
            "begin_step",
            "block_accept_lens_buf",
            "commit_ctx",
            "folds_commit",
            "max_bs",
            "read_accept",
            "simulated_correct_len",
            "stride",
            "verify_lens_buf",
        ),
    },
    "sglang.srt.speculative.dspark_components.dspark_worker_v2": {
        "DSparkWorkerV2": (
            "_block_accept_lens",
            "_block_pos_offsets",
            "_commit_target_mamba_states_after_verify",
            "_decode_graph_allowed",
            "_draft_context",
            "_greedy_draft",
            "_hosts_draft",
            "_kv_injector",
            "_mask_token_id",
            "_need_mamba_verify_commit",
            "_observers",
            "_prepare_inputs_once",
            "_proposer",
            "_rejection_noise",
            "_simulated_correct_len",
            "_tp_sync",
            "_verify_executor",
            "_verify_planner",
            "draft_model",
            "draft_model_runner",
            "gamma",
            "model_runner",
            "verify_num_draft_tokens",
        ),
    },
}

# Module -> function or class -> (hash of its syntax, our file that re-implements it or relies on
# its behaviour).
REIMPLEMENTED: dict[str, dict[str, tuple[str, str]]] = {
    "sglang.kernels.ops.attention.fla.layernorm_gated": {
        "RMSNorm.forward": ("01d2edfbd5bd6a8c", "patches/cpu/delta_rule.py"),
    },
    "sglang.kernels.ops.attention.extend_attention": {
        "_fwd_kernel": ("603a31d7604f5cb9", "kernels/window_attention.py"),
        "extend_attention_fwd": ("1bea11a001b69790", "patches/cuda/triton_attention.py"),
    },
    "sglang.kernels.ops.speculative.dspark.dspark_accept": {
        "accept_greedy": ("7ae5ec8b49beaaec", "backends/cpu/greedy_ops.py"),
    },
    "sglang.kernels.ops.speculative.dspark.dspark_verify_window": {
        "BuildRaggedVerifyWindow": ("326e240ea201116e", "backends/cpu/ragged_layout.py"),
    },
    "sglang.kernels.ops.speculative.gather_spec_extras": {
        "gather_spec_extras": ("1f21ff4acbaaec56", "patches/cpu/gpu_assumptions.py"),
    },
    "sglang.kernels.ops.speculative.row_argmax": {
        "row_argmax": ("0702a37b721eefcc", "patches/cpu/gpu_assumptions.py"),
    },
    "sglang.kernels.ops.speculative.spec_tree": {
        "verify_tree_greedy_func": ("da12a3350dc6cbe6", "backends/cpu/greedy_ops.py"),
    },
    "sglang.srt.arg_groups.speculative_hook": {
        "_disable_overlap_schedule_for_cpu": ("82841798f8f8cbfc", "patches/cpu/arguments.py"),
        "_handle_dspark": ("e6a40832ad6ee7c7", "patches/cpu/arguments.py"),
    },
    "sglang.srt.entrypoints.ollama.serving": {
        "OllamaServing._generate_chat_response": (
            "336d10b6e7384408",
            "patches/upstream_fixes/other_apis.py",
        ),
        "OllamaServing._generate_generate_response": (
            "11884689f392e305",
            "patches/upstream_fixes/other_apis.py",
        ),
        "OllamaServing._stream_chat_response": (
            "1622279cad9f0e90",
            "patches/upstream_fixes/other_apis.py",
        ),
        "OllamaServing._stream_generate_response": (
            "11ac98c1463e8f87",
            "patches/upstream_fixes/other_apis.py",
        ),
    },
    "sglang.srt.function_call.base_format_detector": {
        "BaseFormatDetector.parse_streaming_increment": (
            "1384eafe849de9df",
            "patches/upstream_fixes/stream_pieces.py",
        ),
    },
    "sglang.srt.layers.activation": {
        "SiluAndMul.forward_native": ("e1cd2a1181187d92", "backends/cpu/fused_ops.py"),
    },
    "sglang.srt.layers.attention.linear.gdn_backend": {
        "GDNAttnBackend.forward_extend": ("5e796eef65638773", "patches/step/delta_windows.py"),
    },
    "sglang.srt.layers.attention.triton_backend": {
        "TritonAttnBackend.forward_extend": (
            "29c67645418a148c",
            "patches/cuda/triton_attention.py",
        ),
    },
    "sglang.srt.layers.layernorm": {
        "RMSNorm.forward_native": ("a8067ca8e49f9764", "backends/cpu/fused_ops.py"),
    },
    "sglang.srt.layers.logits_processor": {
        "LogitsProcessor._compute_lm_head": (
            "6203a48229597a8f",
            "backends/cpu/packed_weights.py",
        ),
        "LogitsProcessor.forward": ("dac1799e713def41", "backends/cpu/layers/direct_forward.py"),
    },
    "sglang.srt.layers.quantization.unquant": {
        "UnquantizedEmbeddingMethod.embedding": (
            "1056ddd6d0692b53",
            "backends/cpu/packed_weights.py",
        ),
        "UnquantizedLinearMethod.apply": (
            "e4aba7f77328116e",
            "backends/cpu/packed_weights.py",
        ),
    },
    "sglang.srt.layers.radix_attention": {
        "RadixAttention.forward": ("94fc0f16cd1fd495", "backends/moe/block_window.py"),
    },
    "sglang.srt.layers.rotary_embedding.base": {
        "RotaryEmbedding.forward_native": ("2dd70c0531665b8c", "backends/cpu/fused_ops.py"),
    },
    "sglang.srt.layers.sampler": {
        "Sampler._sample_from_probs": ("3b076117aa3f730a", "backends/cuda/accept_plain.py"),
        "top_k_top_p_min_p_sampling_from_probs_torch": (
            "c6529199fdeb47bc",
            "patches/cpu/seeds.py",
        ),
    },
    "sglang.srt.managers.schedule_batch": {
        "Req._check_str_based_finish": (
            "68f1e7d38aefdb34",
            "patches/upstream_fixes/request_limits.py",
        ),
        "Req.update_finish_state": ("fe88beaca569bea2", "patches/upstream_fixes/answer_stops.py"),
    },
    "sglang.srt.managers.scheduler_components.batch_result_processor": {
        "SchedulerBatchResultProcessor._maybe_update_reasoning_tokens": (
            "c01360cc72a3ca95",
            "patches/upstream_fixes/reasoning_count.py",
        ),
    },
    "sglang.srt.managers.scheduler_components.weight_updater": {
        "SchedulerWeightUpdaterManager._select_runners": (
            "8ac8308a41b54603",
            "serving/weight_updates.py",
        ),
    },
    "sglang.srt.mem_cache.memory_pool": {
        "MHATokenToKVPool.set_kv_buffer": ("7671346c9e2adada", "backends/cpu/attention.py"),
    },
    "sglang.srt.model_executor.forward_batch_info": {
        "ForwardBatch.compute_spec_mrope_positions": (
            "59a13fabaa7be83b",
            "patches/step/mrope_windows.py",
        ),
    },
    "sglang.srt.model_executor.model_runner": {
        "ModelRunner.forward": ("4f20125db00e144f", "backends/cpu/layers/direct_forward.py"),
    },
    "sglang.srt.model_executor.runner.eager_runner": {
        "EagerRunner._execute_extend": (
            "f25086e3ba234be1",
            "backends/cpu/layers/direct_forward.py",
        ),
    },
    "sglang.srt.models.dflash": {
        "DFlashAttention.forward": ("d589ccce08f1eb18", "backends/cpu/csrc/layers.cpp"),
        "DFlashDecoderLayer.forward": ("67f1af2f09b3cb07", "backends/cpu/csrc/layers.cpp"),
        "DFlashDraftModel.forward": ("61d494586964a115", "backends/cpu/layers/layer_stack.py"),
        "DFlashMLP.forward": ("09364795e077f9a9", "backends/cpu/csrc/layers.cpp"),
    },
    "sglang.srt.models.dspark": {
        "DSparkConfidenceHead.forward": ("ececd1c0ae1d9090", "backends/cpu/draft.py"),
        "DSparkDraftMixin._build_fused_kv_write_bundle": (
            "7a879128984ceb59",
            "serving/weight_updates.py",
        ),
        "DSparkDraftMixin._stacked_ctx_kv_params": (
            "2d58271841f208e9",
            "serving/weight_updates.py",
        ),
        "DSparkDraftMixin.compute_base_logits": (
            "19de6102944fed3c",
            "backends/cpu/draft.py",
        ),
        "DSparkDraftMixin.compute_confidence": ("c22c500a4666410b", "backends/cpu/draft.py"),
        "DSparkDraftMixin.write_target_hidden_kv": (
            "046590ed2349e410",
            "backends/cpu/context_kv.py",
        ),
        "project_through_lm_head": ("96906522ae3bd6a9", "backends/cpu/packed_weights.py"),
    },
    "sglang.srt.models.llama": {
        "LlamaAttention.forward": ("73a9570a464e01c5", "backends/cpu/csrc/layers.cpp"),
        "LlamaDecoderLayer.forward": ("9fd9ce4f58568c83", "backends/cpu/csrc/layers.cpp"),
        "LlamaForCausalLM.forward": ("46dc269223e2dea8", "backends/cpu/layers/direct_forward.py"),
        "LlamaMLP.forward": ("42e89d2bc885ae2f", "backends/cpu/csrc/layers.cpp"),
        "LlamaModel.forward": ("c6ff81e33b77038a", "backends/cpu/layers/layer_stack.py"),
    },
    "sglang.srt.models.llama_eagle": {
        "LlamaModel.forward": ("45641cb9d6bf6e89", "patches/cpu/mtp.py"),
    },
    "sglang.srt.models.qwen2": {
        "Qwen2Attention.forward": ("7e0881f16d327e5d", "backends/cpu/csrc/layers.cpp"),
        "Qwen2DecoderLayer.forward": ("9fd9ce4f58568c83", "backends/cpu/csrc/layers.cpp"),
        "Qwen2ForCausalLM.forward": ("252fae117f17193b", "backends/cpu/layers/direct_forward.py"),
        "Qwen2MLP.forward": ("bb42571e4587789f", "backends/cpu/csrc/layers.cpp"),
        "Qwen2Model.forward": ("53d971b0c20ca032", "backends/cpu/layers/layer_stack.py"),
    },
    "sglang.srt.models.qwen3": {
        "Qwen3Attention.forward": ("742d812acd8f2582", "backends/cpu/csrc/layers.cpp"),
        "Qwen3DecoderLayer.forward": ("59c8bb4bcf69687e", "backends/cpu/csrc/layers.cpp"),
        "Qwen3ForCausalLM.forward": ("252fae117f17193b", "backends/cpu/layers/direct_forward.py"),
        "Qwen3Model.forward": ("bd6fb4e5ef5c78d2", "backends/cpu/layers/layer_stack.py"),
    },
    "sglang.srt.models.registry": {
        "import_model_classes": ("be239022e87c9b34", "backends/cpu/log_filters.py"),
    },
    "sglang.srt.plugins.hook_registry": {
        "_propagate_patch": ("214b9340ce2b1e8c", "patches/upstream_fixes/hook_scan.py"),
    },
    "sglang.srt.session.streaming_session": {
        "StreamingSession.try_cache_finished_req": (
            "fb92fcac6d807d2c",
            "patches/upstream_fixes/session_turns.py",
        ),
    },
    "sglang.srt.speculative.dflash_utils": {
        "build_speculative_verify_target_probs": ("33b0e7c5e2386ee7", "backends/cpu/accept.py"),
    },
    "sglang.srt.speculative.dspark_components.dspark_draft": {
        "DraftBlockProposer._run_forward": ("5e893e1185167a0c", "backends/cpu/draft.py"),
        "DraftBlockProposer.propose": ("b2bd5a869a138721", "backends/cpu/draft.py"),
        "_draft_step": ("2c29d3c1f6768869", "kernels/markov_sample.py"),
        "draft_markov_block": ("ec350846a9e550b6", "backends/cuda/draft.py"),
        "sample_draft_block": ("46becff3595a02da", "step/seeds.py"),
    },
    "sglang.srt.speculative.dspark_components.dspark_kv_inject": {
        "TargetHiddenKvInjector.inject_ragged": ("37d7206e13da0c21", "backends/cuda/commit.py"),
    },
    "sglang.srt.speculative.dspark_components.dspark_planner": {
        "DSparkVerifyPlanner.__init__": ("03c17784be272539", "backends/cpu/log_filters.py"),
    },
    "sglang.srt.speculative.dspark_components.dspark_verify": {
        "DsparkVerifyEpilogue.__call__": ("c14d405e05d11d26", "backends/cuda/graph_epilogue.py"),
        "DsparkVerifyEpilogue._accept": ("51c4ecf9f4576e21", "backends/cuda/graph_epilogue.py"),
        "DsparkVerifyEpilogue.capture_hook": (
            "1975c9c8b1508bb2",
            "backends/cuda/graph_epilogue.py",
        ),
        "TargetVerifyExecutor._forward_prepared_verify": (
            "9ee141d2be5c34fd",
            "backends/cpu/verify_forward.py",
        ),
        "TargetVerifyExecutor._run_ragged": ("4ed471ad3466db9e", "backends/cpu/verify_forward.py"),
        "TargetVerifyExecutor.accept_and_finalize": ("5c230e047f32b04a", "step/accept.py"),
        "TargetVerifyExecutor.run_compact": ("52ab44e5f7fb7048", "backends/cuda/compact_pass.py"),
    },
    "sglang.srt.speculative.dspark_components.dspark_worker_v2": {
        "DSparkWorkerV2._forward_decode": ("3aa4eacc539469c4", "step/decode.py"),
    },
    "sglang.srt.speculative.eagle_utils": {
        "eagle_sample": ("b98c0077c73d02c8", "patches/cpu/mtp.py"),
    },
    "sglang.srt.speculative.eagle_worker_v2": {
        "EagleDraftWorker._draft_extend_for_decode": ("82127bbce6269647", "patches/cpu/mtp.py"),
        "EagleDraftWorker.draft": ("db535792da28efd0", "patches/cpu/mtp.py"),
    },
}
