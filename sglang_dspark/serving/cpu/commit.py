"""Greedy accept and context injection of a DSPARK step through our kernels.

Upstream: sglang/kernels/ops/speculative/dspark/dspark_accept.py, `accept_greedy`, and
sglang/srt/models/dspark.py, `write_target_hidden_kv`. On a CPU both are many small torch calls, and
the second works on rejected rows too. What the kernels do not cover keeps upstream's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def accept_greedy(
    original: Callable[..., Any],
    *,
    candidates: Tensor,
    target_logits: Tensor,
    verify_num_draft_tokens: int,
    cutoff_verify_lens: Tensor | None = None,
    fused_argmax: bool = False,
) -> Any:
    """AROUND hook of `accept_greedy`: accepted drafts [R] int32, bonus [R] int64, cut-off [R]."""
    from sglang_dspark.serving.cpu import greedy_ops

    if (
        cutoff_verify_lens is not None
        or candidates.dtype is not torch.int64
        or target_logits.dtype is not torch.float32
        or not target_logits.is_contiguous()
        or candidates.shape[1] != verify_num_draft_tokens
    ):
        return original(
            candidates=candidates,
            target_logits=target_logits,
            verify_num_draft_tokens=verify_num_draft_tokens,
            cutoff_verify_lens=cutoff_verify_lens,
            fused_argmax=fused_argmax,
        )
    accepted, bonus = greedy_ops.accept_window(candidates, target_logits)
    return accepted, bonus, torch.zeros_like(accepted)


def write_target_hidden_kv(
    original: Callable[..., None],
    model: Any,
    *,
    target_hidden: Tensor,
    pool: Any,
    positions: Tensor,
    cache_loc: Tensor,
    cache_loc_2d: Tensor | None = None,
    commit_lens: Tensor | None = None,
    target_hidden_is_projected: bool = False,
) -> None:
    """AROUND hook: target_hidden [n, m*d or d] of tokens at `positions` [n] into the draft's pool.

    With windows, cache_loc_2d [R, w] and commit_lens [R], only each window's first tokens count.
    """
    from sglang_dspark.serving.cpu import context_kv

    slots, lens = cache_loc, None
    if cache_loc_2d is not None and commit_lens is not None:
        slots, lens = cache_loc_2d.reshape(-1), commit_lens
    if context_kv.takes(target_hidden):
        injector, projected = _injector_of(model, pool), target_hidden_is_projected
        if injector and injector.write(target_hidden, positions, slots, lens, projected=projected):
            return
    else:
        context_kv.settle_all(model)
    original(
        model,
        target_hidden=target_hidden,
        pool=pool,
        positions=positions,
        cache_loc=cache_loc,
        cache_loc_2d=cache_loc_2d,
        commit_lens=commit_lens,
        target_hidden_is_projected=target_hidden_is_projected,
    )


def _injector_of(model: Any, pool: Any) -> Any:
    """The model's `Injector`, resolved again when weights or cache were exchanged."""
    from sglang_dspark.serving.cpu import context_kv
    from sglang_dspark.serving.cpu.fast_paths import taken

    found = model.__dict__.get(context_kv.INJECTOR, ...)
    if found is ... or (found is not None and not found.holds(model, pool)):
        name = f"context of {type(model).__name__} written in one call"
        found = taken(name, lambda: context_kv.injector_of(model, pool))
        model.__dict__[context_kv.INJECTOR] = found
    return found
