"""The two passes of a DSPARK step around SGLang's runner: draft block and verify windows.

Upstream: speculative/dspark_components/dspark_draft.py, `DraftBlockProposer._run_forward`,
and dspark_verify.py, `TargetVerifyExecutor._forward_prepared_verify`. Both make a `ForwardBatch` of
some 90 fields and go through the runner's Python, which after a pass over all weights is in no
cache: a millisecond a step. Where model, runner or batch are not what serving/cpu/layers/forward.py
serves, upstream's path runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving import upstream
from sglang_dspark.serving.cpu.fast_paths import fits, need
from sglang_dspark.serving.cpu.layers.models import stack_of_model

_PLAIN = "dspark_plain_ends"  # attribute of a model: (embedding, head or None, the answer)


def run_draft(original: Callable[..., Any], proposer: Any, **step: Any) -> Any:
    """AROUND hook of `_run_forward`: hidden states [R * gamma, d] of the block at its anchors."""
    found = _draft(proposer, **step)
    return original(proposer, **step) if found is None else found


def _draft(
    proposer: Any,
    *,
    batch: Any,
    draft_input: Any,
    verify_window: Any,
    bs: int,
    draft_sampler: Any = None,
    anchor_prepared: bool = False,
    **unused: Any,
) -> Any:
    from sglang_dspark.serving.cpu import context_kv
    from sglang_dspark.serving.cpu.layers import forward as layer_forward
    from sglang_dspark.serving.cpu.layers.support import draft_layer_of, ending_of

    runner, model = proposer.draft_model_runner, proposer.draft_model
    if draft_sampler is not None or not _serves_draft(proposer):
        return None
    table = runner.req_to_token_pool.req_to_token
    context_kv.settle(model, table, batch.req_pool_indices, batch.seq_lens)
    ids = proposer.draft_block_ids_view(bs=bs, device=batch.seq_lens.device)
    if not anchor_prepared:
        ids[:, 0].copy_(draft_input.bonus_tokens.view(-1))
    window = _draft_window(proposer, batch, ids, verify_window)
    stack = stack_of_model(model, draft_layer_of, ending_of, window.forward_mode)
    done = stack and layer_forward.run(runner, stack, model.embed_tokens, window)
    if not done:
        return None
    hidden: Tensor = done[0]
    return upstream.DraftForwardResult(
        draft_block_ids=ids,
        raw_hidden=hidden,
        draft_hidden_3d=hidden.view(bs, proposer.gamma, -1),
        can_run_graph=False,
    )


def run_verify(
    original: Callable[..., Any],
    executor: Any,
    *,
    batch: Any,
    verify_input: Any,
    seq_lens_cpu_backup: Any,
    seq_lens_sum_backup: Any,
) -> Any:
    """AROUND hook of `_forward_prepared_verify`: logits [n, V] and features of the windows."""
    done = verify_pass(executor.target_worker, batch, verify_input, batch.out_cache_loc)
    if done is None:
        return original(
            executor,
            batch=batch,
            verify_input=verify_input,
            seq_lens_cpu_backup=seq_lens_cpu_backup,
            seq_lens_sum_backup=seq_lens_sum_backup,
        )
    batch.input_ids = verify_input.draft_token
    batch.spec_info = verify_input
    batch.forward_mode = done[1]
    batch.seq_lens_cpu = seq_lens_cpu_backup
    batch.seq_lens_sum = seq_lens_sum_backup
    if batch.sampling_info is not None:
        batch.sampling_info.grammars = None  # as `ForwardBatch.init_new` leaves it
    return upstream.TargetVerifyResult(logits_output=done[0], can_run_cuda_graph=False)


def verify_pass(
    worker: Any, batch: Any, verify_input: Any, slots: Tensor
) -> tuple[Any, Any] | None:
    """The pass's output and mode; None, and nothing changed, where upstream's is needed.

    slots: [n] int64, where the keys and values of the rows go.
    """
    from sglang_dspark.serving.cpu import linear
    from sglang_dspark.serving.cpu.layers import forward as layer_forward
    from sglang_dspark.serving.cpu.layers.support import ending_of, target_layer_of

    runner = worker.model_runner
    model = runner.model
    if not (_serves_verify(batch, verify_input) and layer_forward.serves(runner)):
        return None
    if not _plain_target(model):
        return None
    window = layer_forward.Window(
        verify_input.draft_token,
        verify_input.positions,
        slots,
        batch.req_pool_indices,
        batch.seq_lens,
        verify_input,
    )
    inner = model.model
    stack = stack_of_model(inner, target_layer_of, ending_of, window.forward_mode)
    done = stack and layer_forward.run(
        runner, stack, inner.embed_tokens, window, inner.layers_to_capture
    )
    if not done:
        return None
    hidden, captured = done
    features = torch.cat(captured, dim=-1) if len(captured) > 1 else (captured or [hidden])[0]
    logits = linear.product(hidden, model.lm_head.weight)
    output = upstream.LogitsProcessorOutput(next_token_logits=logits, hidden_states=features)
    return output, window.forward_mode


def _draft_window(proposer: Any, batch: Any, ids: Tensor, verify_window: Any) -> Any:
    """The block's rows in the pass; ids: [R, gamma], the anchors and what they draft behind."""
    from sglang_dspark.serving.cpu.layers import forward as layer_forward

    gamma = proposer.gamma
    return layer_forward.Window(
        ids.view(-1),
        verify_window.positions_2d[:, :gamma].reshape(-1),
        verify_window.verify_cache_loc_2d[:, :gamma].reshape(-1),
        batch.req_pool_indices,
        batch.seq_lens,
        proposer._draft_block_spec_info,
    )


def _serves_draft(proposer: Any) -> bool:
    """Whether this draft is the plain one: nothing deferred, nothing between model and runner."""
    from sglang_dspark.serving.cpu.layers import forward as layer_forward

    runner = proposer.draft_model_runner
    same = proposer.draft_model is runner.model
    return same and layer_forward.serves(runner) and _plain_draft(proposer)


def _serves_verify(batch: Any, verify_input: Any) -> bool:
    """Whether all that the batch asks of the pass is logits and the features of every row."""
    return not (
        batch.has_grammar
        or batch.return_logprob
        or batch.input_embeds is not None
        or batch.global_num_tokens is not None
        or batch.forward_mode.is_idle()
        or not verify_input.capture_hidden_mode.is_full()
    )


def _plain_draft(proposer: Any) -> bool:
    """Asked again when the embedding was exchanged."""
    model = proposer.draft_model
    embedding = model.embed_tokens
    found = model.__dict__.get(_PLAIN)
    if found is None or found[0] is not embedding:
        plain = fits(
            f"short draft pass of {type(model).__name__}", lambda: _require_draft(proposer)
        )
        found = model.__dict__[_PLAIN] = (embedding, None, plain)
    return bool(found[2])


def _require_draft(proposer: Any) -> None:
    from sglang_dspark.serving.cpu.layers import forward as layer_forward

    model = proposer.draft_model
    need(proposer.deferred_commit is None, "commits are deferred")
    need(not proposer._dp_moe_sync, "ranks of its experts wait for each other")
    need(proposer.sample_from_anchor, "it does not draft from its anchor")
    need(upstream.envs.SGLANG_DSPARK_EMBED_IN_GRAPH.get(), "SGLANG_DSPARK_EMBED_IN_GRAPH is off")
    need(hasattr(model, "forward_embed"), "it embeds no tokens of its own")
    layer_forward.require_plain_embedding(model.embed_tokens)


def _plain_target(model: Any) -> bool:
    """Asked again when embedding or head were exchanged."""
    from sglang_dspark.serving.cpu.layers import forward as layer_forward

    inner, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    embedding = getattr(inner, "embed_tokens", None)
    found = model.__dict__.get(_PLAIN)
    if found is None or found[0] is not embedding or found[1] is not head:
        name = f"short verify pass of {type(model).__name__}"
        plain = fits(name, lambda: layer_forward.require_plain_target(model))
        found = model.__dict__[_PLAIN] = (embedding, head, plain)
    return bool(found[2])
