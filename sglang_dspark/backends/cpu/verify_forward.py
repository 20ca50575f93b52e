"""Run the target's pass over packed verify windows on a CPU.

Re-implements `TargetVerifyExecutor._run_ragged` and `_forward_prepared_verify`
(sglang/srt/speculative/dspark_components/dspark_verify.py). SGLang's runner makes a `ForwardBatch`
of about 90 fields and plans attention twice; its Python, which no cache holds after a pass over all
weights, costs a millisecond a step. A target, runner or batch that layers/direct_forward.py does
not support uses the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import linear
from sglang_dspark.backends.cpu.layers import direct_forward
from sglang_dspark.backends.cpu.layers.layer_spec import target_layer_of
from sglang_dspark.serving import upstream


def verify_forward(
    worker: Any,
    batch: Any,
    layout: Any,
    window: Any,
    plan: Any = None,
    runner_forward: Callable[[], Any] | None = None,
) -> Any:
    """Return upstream's `LogitsProcessorOutput`: logits [N, V], features [N, m * d].

    layout, window: upstream's `RaggedVerifyLayout` and `RaggedVerifyWindow` of the N rows. plan:
    upstream's, of the step's cache slots; None: the runner makes it. runner_forward: runs the same
    pass by SGLang's runner, for a batch that is not the scheduler's. Only SGLang's runner changes
    the batch.
    """
    verify_input = upstream.DFlashVerifyInput(
        draft_token=window.verify_ids,
        positions=window.positions,
        draft_token_num=int(worker.verify_num_draft_tokens),
        capture_hidden_mode=upstream.CaptureHiddenMode.FULL,
        ragged_verify_layout=layout,
        live_seq_lens_cpu=batch.seq_lens_cpu,
        kv_loc_plan=plan,
        kv_loc_cols=window.window_index,
    )
    output = packed_forward(worker.model_runner, batch, verify_input, window.verify_cache_loc)
    if output is not None:
        return output
    if runner_forward is not None:
        return runner_forward()
    batch.out_cache_loc = window.verify_cache_loc
    return _through_runner(worker, batch, layout, verify_input)


def packed_forward(runner: Any, batch: Any, verify_input: Any, slots: Tensor) -> Any | None:
    """Run embedding, layers and head without SGLang's runner.

    None, with no change, where the runner must run. verify_input: upstream's."""
    model, require_model = runner.model, direct_forward.require_plain_target
    inner: Any = getattr(model, "model", None)
    parts = getattr(inner, "embed_tokens", None), getattr(model, "lm_head", None)
    if batch.input_embeds is not None or not direct_forward.supports_pass(
        runner, require_model, parts
    ):
        return None
    window = direct_forward.Window(
        verify_input.draft_token,
        verify_input.positions,
        slots,
        batch.req_pool_indices,
        batch.seq_lens,
        verify_input,
    )
    done = direct_forward.run(runner, inner, target_layer_of, window, inner.layers_to_capture)
    if done is None:
        return None
    hidden, captured = done
    features = torch.cat(captured, dim=-1) if len(captured) > 1 else (captured or [hidden])[0]
    logits = linear.product(hidden, model.lm_head.weight)
    return upstream.LogitsProcessorOutput(next_token_logits=logits, hidden_states=features)


def _through_runner(worker: Any, batch: Any, layout: Any, verify_input: Any) -> Any:
    """Run the pass by SGLang's runner, after adding the verify input to the batch."""
    lens, total = batch.seq_lens_cpu, batch.seq_lens_sum
    if lens is not None:
        batch.seq_lens_cpu = lens + torch.tensor(layout.verify_lens_cpu, dtype=lens.dtype)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    forward, _ = verify_input.prepare_for_verify(batch, worker.target_worker)
    batch.seq_lens_cpu, batch.seq_lens_sum = lens, total
    return worker.target_worker.forward_batch_generation(
        batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
    ).logits_output
