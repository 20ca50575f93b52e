"""Accept greedily in one launch that is captured with the target's verify pass.

Upstream: `DsparkVerifyEpilogue._accept` in sglang/srt/speculative/dspark_components/
dspark_verify.py. Ours writes to the same buffers, which the step reads as it read upstream's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from sglang_dspark.kernels.accept_greedy import (
    Emitted,
    Room,
    accept_greedy_triton,
    room_for,
    why_not,
)
from sglang_dspark.kernels.platform import runs_on
from sglang_dspark.serving import upstream

logger = logging.getLogger(__name__)
_ROOM = "_sglang_dspark_room"


def accept(
    original: Callable[..., Tensor],
    epilogue: Any,
    *,
    candidates: Tensor,
    logits: Tensor,
    draft_tokens: Tensor,
    seq_lens: Tensor,
    cutoff_verify_lens: Tensor | None = None,
) -> Tensor:
    """Tokens emitted [R] int32 by each request, all else in the epilogue's buffers.

    candidates: [R, gamma + 1]. logits: [R (gamma + 1), V]. cutoff_verify_lens: [R], rows verified,
    0 of a slot without a request; None: upstream's own pass over whole windows.
    """
    requests = len(candidates)
    if cutoff_verify_lens is not None and runs_on(logits.device):
        out = Emitted(*_buffers(epilogue, requests))
        room = _room(epilogue, logits)
        reason = _obstacle(epilogue) or why_not(candidates, cutoff_verify_lens, logits, out, room)
        if reason is None:
            accept_greedy_triton(candidates, cutoff_verify_lens, logits, seq_lens, out, room)
            return out.emitted
        _tell(reason)
    return original(
        epilogue,
        candidates=candidates,
        logits=logits,
        draft_tokens=draft_tokens,
        seq_lens=seq_lens,
        cutoff_verify_lens=cutoff_verify_lens,
    )


@cache
def _tell(reason: str) -> None:
    """Once, not for every graph."""
    logger.warning("drafts are accepted in graphs by SGLang's rule: %s", reason)


def _obstacle(epilogue: Any) -> str | None:
    """Return what else upstream does in between, in one line; None if nothing."""
    if epilogue.simulated_correct_len is not None:
        return "accepted lengths are simulated"
    if epilogue._tp_sync.enabled(upstream.SpecTpSyncSite.DSPARK_ACCEPT_GRAPH):
        return "tensor-parallel ranks agree on the outcome"
    if epilogue.block_accept_lens_buf is not None:
        return "SGLANG_OPT_DSV41_POST_FORWARD_CUDA_GRAPH is set"
    return None


def _buffers(epilogue: Any, requests: int) -> tuple[Tensor, ...]:
    outs = epilogue.read_accept(requests)
    return (
        outs.correct_len,
        outs.bonus,
        outs.cap_trim_lens,
        outs.commit_lens,
        outs.new_seq_lens,
        outs.out_tokens,
    )


def _room(epilogue: Any, logits: Tensor) -> Room:
    """Made when a graph is warmed up; what is made while one is captured is the graph's own."""
    room: Room | None = epilogue.__dict__.get(_ROOM)
    if room is None:
        room = room_for(epilogue.max_bs, epilogue.stride, logits.device)
        epilogue.__dict__[_ROOM] = room
    return room
