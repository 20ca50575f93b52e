"""Run an MTP draft step (EAGLE, topk 1) by the fast paths of DSPARK's step.

Upstream: sglang/srt/models/llama_eagle.py (`LlamaModel.forward`),
sglang/srt/speculative/eagle_worker_v2.py (`EagleDraftWorker.draft`, `_draft_extend_for_decode`) and
eagle_utils.py (`eagle_sample`). DSPARK is compared with MTP-1, so both get the same fast paths on a
CPU. Drafts are accepted by our rules (backends/cpu/accept.py, greedy_ops.py).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import accept, greedy_ops
from sglang_dspark.backends.cpu.fast_paths import log_off
from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream

_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
SEAMS = Seams(device="cpu")


def forward_model(
    original: Callable[..., Tensor],
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: Any,
    input_embeds: Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Tensor:
    """Compute tokens [n] -> hidden [n, d] (AROUND hook of the draft's `LlamaModel.forward`)."""
    if input_embeds is None:
        input_embeds = model.embed_tokens(input_ids)
    before, backend = forward_batch.spec_info.hidden_states, upstream.get_attn_backend()
    hidden = _run_layers(model, input_embeds, before, backend, positions, forward_batch)
    if hidden is not None:
        return hidden
    return original(model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)


@SEAMS.around(
    "cpu-mtp-draft",
    f"{_WORKER}.draft",
    signature="(self, batch, *, with_topology=False)",
    why="upstream prepares a pass of the draft that a single step does not make",
)
def draft_one(
    original: Callable[..., Any], worker: Any, batch: Any, *, with_topology: bool = False
) -> Any:
    """Reuse the last step's draft if it has one token (AROUND hook of `EagleDraftWorker.draft`).

    Upstream also plans a pass of the draft model, which it then does not run.
    """
    known, hot = batch.spec_info, worker.hot_token_id
    if (
        with_topology
        or worker.speculative_num_steps != 1
        or not _plain_chain(worker, batch)
        or (requests := len(known.topk_index)) > len(worker._topk1_parents_prealloc)
    ):
        return original(worker, batch, with_topology=with_topology)
    return upstream.build_eagle_verify_input(
        batch,
        known,
        worker._topk1_parents_prealloc[:requests],
        worker._topk1_score_indices_prealloc[:requests],
        known.topk_index if hot is None else hot[known.topk_index],
        None,
        target_worker=worker.target_worker,
        topk=1,
        num_steps=1,
        num_draft_tokens=worker.speculative_num_draft_tokens,
        tree_mask_mode=worker.tree_mask_mode,
        device=worker.device,
    )


@SEAMS.around(
    "cpu-eagle-accept",
    "sglang.srt.speculative.eagle_utils.eagle_sample",
    signature="(verify_input, batch, logits_output, grammar_mask=None, "
    "uno_target_max_top_k=None, *, watermark_state=None, watermark_full_mask=True)",
    why="upstream ignores the temperature on a CPU, and walks a tree with thirty torch calls",
)
def accept_drafts(
    original: Callable[..., Any],
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    *unused: Any,
    **watermark: Any,
) -> Any:
    """Return tokens [R * n], lengths [R], accepted rows [R, n] (AROUND hook of `eagle_sample`).

    Upstream's treats every request as greedy on a CPU, and watermarks on a GPU only.
    """
    if batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, grammar_mask, *unused, **watermark)
    logits, info = logits_output.next_token_logits, batch.sampling_info
    _adjust(logits, info, verify_input.draft_token_num, grammar_mask)
    if not info.is_all_greedy:
        return _of_rank_0(accept.sample_windows(verify_input, info, logits))
    window = verify_input.draft_token.view(-1, verify_input.draft_token_num)
    predicted, index, lens = greedy_ops.verify_chains(
        window.to(torch.int64), logits.float().contiguous()
    )
    return predicted, lens, index


def _adjust(logits: Tensor, info: Any, n: int, grammar_mask: Any) -> None:
    """Apply penalties, biases and grammar to logits [R * n, V] in place, in upstream's order."""
    upstream.sanitize_nan_logits(logits, "verify: target model logits")
    if info.acc_additive_penalties is not None:
        logits.add_(info.acc_additive_penalties.repeat_interleave(n, 0))
    if info.acc_scaling_penalties is not None:
        upstream.apply_scaling_penalties(logits, info.acc_scaling_penalties.repeat_interleave(n, 0))
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(n, 0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)


def _of_rank_0(outcome: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Broadcast rank 0's outcome in place: each rank draws its own random numbers."""
    parallel = upstream.get_parallel()
    group = parallel.attn_tp_group if parallel.attn_dp_enabled else parallel.tp_group
    if group.world_size > 1:
        for each in outcome:
            group.broadcast(each, src=0)
    return outcome


@SEAMS.around(
    "cpu-mtp-extend",
    f"{_WORKER}._draft_extend_for_decode",
    signature="(self, batch, batch_result, *, kv_loc_plan=None)",
    why="upstream plans the target's pass again and takes rejected rows through the LM head",
)
def extend_verified(
    original: Callable[..., None],
    worker: Any,
    batch: Any,
    batch_result: Any,
    *,
    kv_loc_plan: Any = None,
) -> None:
    """Run the draft model over the verified windows (AROUND hook of `_draft_extend_for_decode`).

    Rows, positions and slots are those of the target's last pass, so its plan is reused; only the
    last accepted row of a window is multiplied by the draft's LM head.
    """
    hidden = None
    if kv_loc_plan is None and _plain_chain(worker, batch):
        hidden = _window_states(worker, batch, batch_result)
    if hidden is None:
        original(worker, batch, batch_result, kv_loc_plan=kv_loc_plan)
        return
    lens, model = batch_result.accept_lens, worker.draft_runner.model
    starts = torch.arange(0, hidden.shape[0], worker.speculative_num_draft_tokens)
    chosen = hidden[starts + (lens - 1)]  # [R, d]
    logits = model.logits_processor._compute_lm_head(chosen, model.lm_head)
    following = batch_result.next_draft_input
    following.topk_index = greedy_ops.row_argmax(logits.float().contiguous())[:, None]
    following.topk_p = torch.ones(len(logits), 1)
    following.hidden_states = chosen
    following.cuda_graph_compatible = True


def _window_states(worker: Any, batch: Any, result: Any) -> Tensor | None:
    """Return the draft's states [R * n, d] after each verified token; None: upstream must run."""
    from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend

    runner, window = worker.draft_runner, batch.spec_info
    theirs, ours = worker.target_worker.model_runner.attn_backend, runner.attn_backend
    why = upstream.other_class("its model", runner.model, upstream.LlamaForCausalLMEagle)
    if why is not None:
        log_off("draft over the verified windows", why)
        return None
    head = runner.model.logits_processor  # its logits must be the LM head's product alone
    if (
        head.logit_scale is not None
        or head.final_logit_softcapping
        or not isinstance(theirs, DsparkCpuAttnBackend)
        or not isinstance(ours, DsparkCpuAttnBackend)
        or result.logits_output.hidden_states is None
    ):
        return None
    model, before = runner.model.model, result.logits_output.hidden_states
    tokens = model.embed_tokens(result.next_token_ids.to(torch.int64))
    ours.plan = theirs.plan
    pass_ = SimpleNamespace(out_cache_loc=batch.out_cache_loc, forward_mode=batch.forward_mode)
    return _run_layers(model, tokens, before, ours, window.positions, pass_)


def _run_layers(
    model: Any, embeddings: Tensor, before: Tensor, backend: Any, positions: Tensor, batch: Any
) -> Tensor | None:
    """Run the draft's layers over fc([embedding; hidden before]), [n, d] each -> [n, d].

    Returns None where they are not supported.
    """
    from sglang_dspark.backends.cpu import linear
    from sglang_dspark.backends.cpu.layers import layer_spec, layer_stack

    stack = layer_stack.stack_of_model(model, layer_spec.eagle_layer_of)
    if stack is None:
        return None
    entered = linear.product(torch.cat((embeddings, before), -1), model.fc.weight, model.fc.bias)
    done = layer_stack.run(stack, backend, positions, entered, batch)
    return done and done[0]


def _plain_chain(worker: Any, batch: Any) -> bool:
    """Return whether a step drafts greedily, on one rank and without extras.

    On a CPU trees are chains (arguments.py).
    """
    runner = worker.draft_runner
    return (
        not batch.forward_mode.is_idle()
        and not upstream.get_spec().speculative_use_rejection_sampling
        and not worker.seed_dsa_topk_from_draft_extend
        and runner.canary_manager is None
        and not runner.kv_index_translator.is_translating
        and upstream.get_parallel().pp_size == 1
        and upstream.get_parallel().tp_size == 1
    )
