"""Ragged verification without spreading rows over whole windows: pass, accept, context injection.

Upstream (0.5.23): srt/speculative/dspark_components/dspark_verify.py, `TargetVerifyExecutor`. Where
something else reads the logits window by window (grammar, log-probabilities, penalties, biases,
sampling masks) the pass and the injection are upstream's; the accept rule is ours all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.patches.cpu_penalties import compact_with_penalties
from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving.cpu.seeds import seeds_of

_ROWS = "dspark_rows"  # attribute of the executor: the packed rows of the step in flight


def run_compact(original: Callable[..., Any], executor: Any, **step: Any) -> tuple[Any, Tensor]:
    """AROUND hook: logits and hidden states of the pass, row by row as they were computed."""
    from sglang_dspark.serving.schedule.attach import engine_of
    from sglang_dspark.serving.schedule.layout import rows_in, window_of

    executor.__dict__[_ROWS] = None
    if engine_of(executor) is None:
        return compact_with_penalties(original, executor, **step)
    layout, verify_window = step["layout"], step["verify_window"]
    rows = rows_in(layout, executor.verify_num_draft_tokens)
    window = window_of(rows, step["draft_block_ids"], step["draft_tokens"], verify_window)
    executor.__dict__[_ROWS] = (rows, window)
    if _reads_windows(step["batch"], step["sampling_info"]):
        return compact_with_penalties(original, executor, **step)
    done = executor._run_ragged(
        batch=step["batch"],
        layout=layout,
        ragged_window=window,
        sampling_info=step["sampling_info"],
        kv_loc_plan=verify_window.kv_loc_plan,
    )
    return done, done.logits_output.hidden_states


def _reads_windows(batch: Any, sampling_info: Any) -> bool:
    from sglang.srt.speculative.dspark_components.dspark_verify import (
        verify_logits_adjustments_are_noop,
    )

    from sglang_dspark.serving.cpu.penalties import penalised

    if batch.has_grammar or batch.return_logprob:
        return True
    if sampling_info is None:
        return False
    if sampling_info.sampling_mask_batch_indices is not None or penalised(batch.reqs):
        return True
    return not verify_logits_adjustments_are_noop(sampling_info)


def accept_and_finalize(original: Callable[..., Any], executor: Any, **step: Any) -> Any:
    """AROUND hook: accept over what was verified, and tell the scheduler."""
    from sglang_dspark.serving.schedule.attach import engine_of

    engine = engine_of(executor)
    packed = engine is not None and step["layout"] is not None
    ours = packed or (_alone(step) and seeds_of(step["sampling_info"]) is not None)
    outs = _accept(executor, **step) if ours else original(executor, **step)
    if engine is not None:
        engine.outcome(outs.correct_len)
    return outs


def _alone(step: dict[str, Any]) -> bool:
    """Whole windows on a single rank: nothing of upstream's is needed to accept them."""
    from sglang.srt.runtime_context import get_parallel

    return step["layout"] is None and get_parallel().tp_size == 1


def _accept(
    executor: Any,
    *,
    bs: int,
    verify_ids_2d: Tensor,
    target_logits: Tensor,
    draft_block: Any,
    sampling_info: Any,
    layout: Any,
    prefix_lens: Tensor,
    draft_tokens: Tensor,
    **unused: Any,
) -> Any:
    from sglang.srt.speculative.dspark_components.dspark_verify import AcceptOuts

    from sglang_dspark.serving.cpu.ragged_ops import committed
    from sglang_dspark.serving.schedule.accept import accept
    from sglang_dspark.serving.schedule.layout import whole_rows

    if layout is None:
        rows = whole_rows(bs, executor.verify_num_draft_tokens)
    else:
        rows, _ = executor.__dict__[_ROWS]
    packed = target_logits.shape[0] == rows.total
    starts = rows.starts if packed else rows.strided
    accepted, bonus = accept(
        verify_ids_2d, rows.lens, starts, target_logits, draft_block, sampling_info, prefix_lens
    )
    # A single rank: with several there is no engine (attach.py), so nothing is to be agreed on.
    commit, lens, tokens = committed(draft_tokens, accepted, bonus, prefix_lens)
    return AcceptOuts(
        correct_len=accepted,
        bonus=bonus,
        cap_trim_lens=_no_trim(bs),
        commit_lens=commit,
        new_seq_lens=lens,
        out_tokens=tokens,
    )


@lru_cache(maxsize=512)
def _no_trim(bs: int) -> Tensor:
    """No draft that was admitted is dropped afterwards; nobody writes to it."""
    return torch.zeros(bs, dtype=torch.int32)


def commit_hidden(original: Callable[..., None], executor: Any, **step: Any) -> None:
    """AROUND hook: hidden states of accepted rows into the draft's context, from packed rows."""
    from sglang_dspark.serving.cpu.ragged_ops import rows_of

    hidden, found = step["hidden_strided"], executor.__dict__.get(_ROWS)
    if not step["run_compact"] or found is None or hidden.shape[0] != found[0].total:
        original(executor, **step)
        return
    rows, window = found
    commit = step["commit_lens"]
    slots, positions, kept = window.verify_cache_loc, window.positions, int(commit.sum())
    if kept < rows.total:
        chosen = rows_of(rows.starts, commit, kept)
        hidden, slots, positions = hidden[chosen], slots[chosen], positions[chosen]
    executor.kv_injector.inject_target_hidden(
        target_hidden=hidden,
        cache_loc=slots,
        cache_loc_2d=None,
        positions=positions,
        commit_lens=None,
    )


_EXECUTOR = "sglang.srt.speculative.dspark_components.dspark_verify.TargetVerifyExecutor"

SEAMS = (
    Seam(
        name="cpu-schedule-pass",
        target=f"{_EXECUTOR}.run_compact",
        kind="around",
        hook=run_compact,
        signature="(self, *, batch, layout, draft_block_ids, draft_tokens, bs, device, "
        "sampling_info, verify_window, inject_gate=False)",
        why="upstream spreads the logits of a ragged pass over whole windows: 9 MB at eight users",
        device="cpu",
    ),
    Seam(
        name="cpu-schedule-accept",
        target=f"{_EXECUTOR}.accept_and_finalize",
        kind="around",
        hook=accept_and_finalize,
        signature="(self, *, folded_accept, bs, verify_ids_2d, target_logits, draft_block, "
        "sampling_info, draft_input, layout, prefix_lens, draft_tokens, "
        "simulate_bonus_sampling_info=None)",
        why="upstream accepts over whole windows, and the scheduler learns from outcomes",
        device="cpu",
    ),
    Seam(
        name="cpu-schedule-commit",
        target=f"{_EXECUTOR}.commit_hidden",
        kind="around",
        hook=commit_hidden,
        signature="(self, *, batch, layout, hidden_strided, verify_window, logits_output, "
        "commit_lens, bs, run_compact)",
        why="hidden states of packed rows lie elsewhere than those of whole windows",
        device="cpu",
    ),
)
