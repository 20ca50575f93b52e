"""Penalties and min_new_tokens under DSPARK on a CPU, each verified row with its own.

Upstream: srt/speculative/dspark_components/dspark_verify.py, `TargetVerifyExecutor`,
adjusts the logits of a pass by `dflash_utils.apply_dflash_verify_logits_adjustments`, which reads a
field for penalties that no longer exists. So penalties have no effect on what DSPARK serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving import upstream
from sglang_dspark.serving.cpu.penalties import apply_penalties, penalised

_WINDOWS = "dspark_penalised_windows"  # attribute of the executor: windows of the step before


def run_compact(original: Callable[..., Any], executor: Any, **step: Any) -> tuple[Any, Tensor]:
    """AROUND hook: a ragged pass, its logits spread over whole windows and penalised there."""
    if step["sampling_info"] is None or not penalised(step["batch"].reqs):
        return original(executor, **step)
    done, hidden = original(executor, **{**step, "sampling_info": None})
    window = torch.cat([step["draft_block_ids"][:, :1], step["draft_tokens"]], dim=1)
    _adjust(executor, done, window, step)
    return done, hidden


def run_non_compact(original: Callable[..., Any], executor: Any, **step: Any) -> Any:
    """AROUND hook: a pass over whole windows."""
    if step["sampling_info"] is None or not penalised(step["batch"].reqs):
        return original(executor, **step)
    done = original(executor, **{**step, "sampling_info": None})
    _adjust(executor, done, step["verify_ids_2d"], step)
    return done


def _adjust(executor: Any, done: Any, window: Tensor, step: dict[str, Any]) -> None:
    """Penalties first, then what upstream adds: logit processors and biases."""
    logits = done.logits_output.next_token_logits  # [R * W, V]
    requests, width = window.shape
    executor.__dict__[_WINDOWS] = apply_penalties(
        logits.view(requests, width, -1),
        step["batch"].reqs,
        window,
        step["verify_window"].positions_2d[:, 0],
        executor.__dict__.get(_WINDOWS, {}),
    )
    upstream.apply_dflash_verify_logits_adjustments(
        next_token_logits=logits, sampling_info=step["sampling_info"], draft_token_num=width
    )
