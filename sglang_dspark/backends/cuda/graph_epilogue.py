"""Accept greedily and commit at the end of a captured verify pass, on its packed rows.

Upstream: `DsparkVerifyEpilogue.capture_hook` in sglang/srt/speculative/dspark_components/
dspark_verify.py. It first scatters logits and hidden states to windows of all slots, whether or not
a step samples, and a step commits after the graph. Ours writes outcomes to the same buffers, so
the step reads them unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cuda.commit import ContextRows, StepCommit
from sglang_dspark.kernels.accept_greedy import (
    Emitted,
    Room,
    accept_greedy_triton,
    room_for,
    why_not,
)
from sglang_dspark.kernels.platform import runs_on
from sglang_dspark.serving import mode, upstream

logger = logging.getLogger(__name__)
_TAIL = "_sglang_dspark_tail"


@dataclass
class Tail:
    """Scratch and commit of one worker's graphs. commits: the graphs write the draft's context."""

    room: Room
    commit: StepCommit
    commits: bool | None = None  # None: before the first graph's warm-up


def run(
    original: Callable[..., None], epilogue: Any, runner: Any, out: Any, batch: Any, tokens: int
) -> None:
    """End a captured pass; called in warm-up and in capture. Arguments as for `capture_hook`."""
    ours = mode.choice().ours and _is_ragged_verify(runner, out, batch)
    if not ours or not runs_on(out.next_token_logits.device):
        original(epilogue, runner, out, batch, tokens)
        return
    tail = _tail(epilogue, out.next_token_logits.device)
    if not _accepts(epilogue, tail, out, batch):
        original(epilogue, runner, out, batch, tokens)
    runners = runner.model_runner, epilogue.commit_ctx.kv_injector.draft_model_runner
    if any(each.kv_index_translator.is_translating for each in runners):
        committed = False  # a row's slot differs between the caches
    else:
        committed = tail.commit.context(out.hidden_states.device) is not None
    assert tail.commits in (None, committed), "all graphs of a worker commit, or none does"
    tail.commits = committed
    if committed:
        tail.commit.write(ContextRows(out.hidden_states, batch.positions, batch.out_cache_loc))


def commits(epilogue: Any) -> bool:
    """Return whether the captured graphs write the draft's context."""
    tail: Tail | None = None if epilogue is None else epilogue.__dict__.get(_TAIL)
    return tail is not None and bool(tail.commits)


def committer_of(worker: Any) -> StepCommit:
    """Return the graphs' commit, for passes outside of graphs; a new one where there are none."""
    epilogue = worker._verify_executor.verify_epilogue
    tail: Tail | None = None if epilogue is None else epilogue.__dict__.get(_TAIL)
    return StepCommit(worker._kv_injector) if tail is None else tail.commit


def detach(executor: Any) -> None:
    """Let SGLang's own step scatter and accept after graphs that end by our rule.

    Its `run_compact` reads windows that only its own epilogue fills.
    """
    if _TAIL in getattr(executor.verify_epilogue, "__dict__", {}):
        executor.verify_epilogue = None


def _is_ragged_verify(runner: Any, out: Any, batch: Any) -> bool:
    return (
        bool(runner.ragged_verify_mode)
        and not runner.model_runner.is_draft_worker
        and batch.forward_mode.is_target_verify()
        and getattr(out, "next_token_logits", None) is not None
        and getattr(out, "hidden_states", None) is not None
    )


def _tail(epilogue: Any, device: torch.device) -> Tail:
    """Make the tail when the first graph is warmed up: memory made in a capture is that graph's."""
    tail: Tail | None = epilogue.__dict__.get(_TAIL)
    if tail is None:
        room = room_for(epilogue.max_bs, epilogue.stride, device)
        tail = Tail(room, StepCommit(epilogue.commit_ctx.kv_injector))
        epilogue.__dict__[_TAIL] = tail
    return tail


def _accepts(epilogue: Any, tail: Tail, out: Any, batch: Any) -> bool:
    """Accept by our rule; return False if upstream's epilogue must run."""
    requests = int(batch.batch_size)
    emitted, rows = Emitted(*_buffers(epilogue, requests)), epilogue.verify_lens_buf[:requests]
    logits = out.next_token_logits
    reason = _obstacle(epilogue) or why_not(batch.input_ids, rows, logits, emitted, tail.room)
    if reason is not None:
        _log(reason)
        return False
    accept_greedy_triton(batch.input_ids, rows, logits, batch.seq_lens, emitted, tail.room)
    return True


@cache
def _log(reason: str) -> None:
    """Log the reason once, not for every graph."""
    logger.warning("drafts are accepted in graphs by SGLang's rule: %s", reason)


def _obstacle(epilogue: Any) -> str | None:
    """Return the work of upstream's epilogue that ours does not do, in one line, or None."""
    if epilogue.folds_commit:
        return "the draft's cache is one of a latent attention, which SGLang's epilogue writes"
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
