"""Greedy accept and context injection of a DSPARK step through our kernels.

Upstream (0.5.23): sglang/kernels/ops/speculative/dspark/dspark_accept.py, `accept_greedy`, and
sglang/srt/models/dspark.py, `write_target_hidden_kv`. On a CPU both are many small torch calls, and
the second works on rejected rows too. What the kernels do not cover keeps upstream's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.patches.seam import Seam


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

    stacked = None
    if context_kv.fits(model, pool, target_hidden):
        stacked = model._stacked_ctx_kv_params()
    if stacked is None or stacked["bias"] is not None:
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
        return
    slots = cache_loc
    if cache_loc_2d is not None and commit_lens is not None:
        rows = context_kv.committed(commit_lens, cache_loc_2d.shape[1])
        slots = cache_loc_2d.reshape(-1)[rows]
        target_hidden, positions = target_hidden[rows], positions[rows]
    if target_hidden.shape[0] == 0:
        return
    context = target_hidden
    if not target_hidden_is_projected:
        context = model.project_target_hidden(target_hidden)
    context_kv.write(model, pool, stacked, context, positions, slots)


SEAMS = (
    Seam(
        name="cpu-accept-greedy",
        target="sglang.kernels.ops.speculative.dspark.dspark_accept.accept_greedy",
        kind="around",
        hook=accept_greedy,
        signature="(*, candidates, target_logits, verify_num_draft_tokens, "
        "cutoff_verify_lens=None, fused_argmax=False)",
        why="torch.argmax over every row of every window, ten more calls to count agreements",
        device="cpu",
    ),
    Seam(
        name="cpu-context-kv",
        target="sglang.srt.models.dspark.DSparkDraftMixin.write_target_hidden_kv",
        kind="around",
        hook=write_target_hidden_kv,
        signature="(self, *, target_hidden, pool, positions, cache_loc, cache_loc_2d=None, "
        "commit_lens=None, target_hidden_is_projected=False)",
        why="upstream projects rejected rows too, through F.linear, and writes layer by layer",
        device="cpu",
    ),
)
