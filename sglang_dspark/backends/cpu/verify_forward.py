"""Run the target's pass over packed verify windows on a CPU.

Re-implements `TargetVerifyExecutor._run_ragged` and `_forward_prepared_verify`
(sglang/srt/speculative/dspark_components/dspark_verify.py). SGLang's runner makes a `ForwardBatch`
of about 90 fields and plans attention twice; its Python, which no cache holds after a pass over all
weights, costs a millisecond a step. A target, runner or batch that layers/direct_forward.py does
not support uses the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import linear
from sglang_dspark.backends.cpu.fast_paths import supported
from sglang_dspark.backends.cpu.layers import direct_forward
from sglang_dspark.backends.cpu.layers.layer_spec import target_layer_of
from sglang_dspark.backends.cpu.layers.layer_stack import stack_of_model
from sglang_dspark.serving import upstream

_PLAIN = "dspark_plain_ends"  # attribute of a model: (embedding, head, whether it is plain)


@dataclass(frozen=True)
class VerifyRows:
    """The packed rows of one pass: N tokens of R requests.

    ids, positions, slots: [N] int64; slots: for keys and values. layout: upstream's
    `RaggedVerifyLayout`. plan, columns: upstream's plan of the cache slots, and its columns for
    these rows; None where the runner makes the plan.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    layout: Any
    plan: Any = None
    columns: Tensor | None = None


def verify_forward(
    worker: Any, batch: Any, rows: VerifyRows, runner_forward: Callable[[], Any] | None = None
) -> Any:
    """Return upstream's `LogitsProcessorOutput`: logits [N, V], features [N, m * d].

    runner_forward: runs the same pass by SGLang's runner, for a batch that is not the scheduler's.
    Only SGLang's runner changes the batch.
    """
    verify_input = _verify_input(worker, batch, rows)
    output = packed_forward(worker.model_runner, batch, verify_input, rows.slots)
    if output is not None:
        return output
    if runner_forward is not None:
        return runner_forward()
    return _through_runner(worker, batch, rows, verify_input)


def packed_forward(runner: Any, batch: Any, verify_input: Any, slots: Tensor) -> Any | None:
    """Run embedding, layers and head without SGLang's runner.

    None, with no change, where the runner must run. verify_input: upstream's."""
    model = runner.model
    if (
        batch.input_embeds is not None
        or not direct_forward.supports_runner(runner)
        or not _is_plain(model)
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
    inner = model.model
    stack = stack_of_model(inner, target_layer_of)
    done = stack and direct_forward.run(
        runner, stack, inner.embed_tokens, window, inner.layers_to_capture
    )
    if not done:
        return None
    hidden, captured = done
    features = torch.cat(captured, dim=-1) if len(captured) > 1 else (captured or [hidden])[0]
    logits = linear.product(hidden, model.lm_head.weight)
    return upstream.LogitsProcessorOutput(next_token_logits=logits, hidden_states=features)


def _verify_input(worker: Any, batch: Any, rows: VerifyRows) -> Any:
    return upstream.DFlashVerifyInput(
        draft_token=rows.ids,
        positions=rows.positions,
        draft_token_num=int(worker.verify_num_draft_tokens),
        capture_hidden_mode=upstream.CaptureHiddenMode.FULL,
        ragged_verify_layout=rows.layout,
        live_seq_lens_cpu=batch.seq_lens_cpu,
        kv_loc_plan=rows.plan,
        kv_loc_cols=rows.columns,
    )


def _through_runner(worker: Any, batch: Any, rows: VerifyRows, verify_input: Any) -> Any:
    """Run the pass by SGLang's runner, after adding the verify input to the batch."""
    lens, total = batch.seq_lens_cpu, batch.seq_lens_sum
    batch.out_cache_loc = rows.slots
    if lens is not None:
        batch.seq_lens_cpu = lens + torch.tensor(rows.layout.verify_lens_cpu, dtype=lens.dtype)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    forward, _ = verify_input.prepare_for_verify(batch, worker.target_worker)
    batch.seq_lens_cpu, batch.seq_lens_sum = lens, total
    return worker.target_worker.forward_batch_generation(
        batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
    ).logits_output


def _is_plain(model: Any) -> bool:
    """Return whether a target is embedding, layers and head; rechecked when these change."""
    inner, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    embedding = getattr(inner, "embed_tokens", None)
    found = model.__dict__.get(_PLAIN)
    if found is None or found[0] is not embedding or found[1] is not head:
        name = f"fast verify pass of {type(model).__name__}"
        plain = supported(name, lambda: direct_forward.require_plain_target(model))
        found = model.__dict__[_PLAIN] = (embedding, head, plain)
    return bool(found[2])
