"""Write target hidden states into the draft's keys and values by one call of compiled code.

Decode steps call `write_context`; a prefill comes through the hook of `write_target_hidden_kv`
(sglang/srt/models/dspark.py), which is many small torch calls and works on rejected rows too. What
the kernels do not cover keeps upstream's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import context_kv
from sglang_dspark.backends.cpu.fast_paths import taken


def write_context(worker: Any, hidden: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Write target hidden states [n, m * d] of committed tokens into the draft's keys and values.

    slots, positions: [n] int64.
    """
    model, pool = worker.draft_model, worker.draft_model_runner.token_to_kv_pool
    with torch.inference_mode():
        if context_kv.takes(hidden):
            injector = _injector_of(model, pool)
            if injector and injector.write(hidden, positions, slots, None, projected=False):
                return
        model.write_target_hidden_kv(
            target_hidden=hidden, pool=pool, positions=positions, cache_loc=slots
        )


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
    found = model.__dict__.get(context_kv.INJECTOR, ...)
    if found is ... or (found is not None and not found.holds(model, pool)):
        name = f"context of {type(model).__name__} written in one call"
        found = taken(name, lambda: context_kv.injector_of(model, pool))
        model.__dict__[context_kv.INJECTOR] = found
    return found
