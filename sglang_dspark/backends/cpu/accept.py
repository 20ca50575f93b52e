"""The accept rules over packed rows (paper, 3.1), with plain decoding's own law for sampling.

Upstream's rules (kernels/ops/speculative/dspark/dspark_accept.py, 0.5.23) run over windows of
gamma + 1 whatever was verified and cut afterwards. Here a request's last verified row gives the
bonus token straight from the target's law, so nothing behind it is read: neither rows that were
not verified nor drafts that were not made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.block_ops import walk
from sglang_dspark.backends.cpu.ragged_ops import accept_greedy, committed
from sglang_dspark.backends.cpu.seeded_ops import choose
from sglang_dspark.backends.cpu.target_law import target_law
from sglang_dspark.serving import upstream
from sglang_dspark.serving.config import current_config
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.verify.acceptance import Acceptance
from sglang_dspark.verify.block import accept_block
from sglang_dspark.verify.rejection import accept_sampled
from sglang_dspark.verify.seeded import accept_seeded

Rule = Callable[..., Acceptance]
Outcome = tuple[Tensor, Tensor]  # accepted drafts [R] int32, next token [R] int64


def accept(
    window: Tensor,
    lens: Tensor,
    starts: Tensor,
    logits: Tensor,
    draft_block: Any,
    sampling_info: Any,
    anchors: Tensor,
    seeds: Seeds | None = None,
) -> Outcome:
    """Accepted drafts [R] int32 and the next token [R] int64 of each request.

    window: [R, gamma + 1] int64, anchor and drafts. lens, starts: [R] int64, tokens verified and
    first row of each request in logits [N, V]. draft_block: upstream's `DraftBlockResult`; its
    logits, where there are any, cover at least the drafts that were verified. anchors: [R] the
    anchors' positions, which with a request's seed decide its tokens. seeds: of the sampled
    requests that have one.
    """
    logits = logits.float().contiguous()  # nothing is copied where it is already
    if sampling_info is None or sampling_info.is_all_greedy:
        return accept_greedy(window, lens, starts, logits)
    probs = _laws(lens, starts, logits, sampling_info)
    sampled = _sampled(window, lens, probs, draft_block)
    if seeds is not None:
        sampled = _seeded(sampled, window[:, 1 : probs.shape[1]], lens, probs, anchors, seeds)
    if not sampling_info.is_any_greedy:
        return sampled
    greedy = accept_greedy(window, lens, starts, logits)
    return _either(draft_block.greedy_mask, greedy, sampled)


def accept_rows(
    ids: Tensor,
    lens: Tensor,
    starts: Tensor,
    logits: Tensor,
    draft_block: Any,
    sampling_info: Any,
    prefix: Tensor,
    seeds: Seeds | None,
    tp_sync: Any,
) -> Any:
    """Upstream's `AcceptOuts` of `accept`; ids: [R, gamma + 1], prefix: [R] tokens before them.

    tp_sync: upstream's, by which ranks agree on the outcome.
    """
    outcome = accept(ids, lens, starts, logits, draft_block, sampling_info, prefix, seeds)
    accepted, bonus = (agreed(each, tp_sync) for each in outcome)
    commit, new_lens, tokens = committed(draft_block.draft_tokens, accepted, bonus, prefix)
    return upstream.AcceptOuts(
        correct_len=accepted,
        bonus=bonus,
        cap_trim_lens=_no_trim(len(lens)),
        commit_lens=commit,
        new_seq_lens=new_lens,
        out_tokens=tokens,
    )


def agreed(outcome: Tensor, tp_sync: Any) -> Tensor:
    """Rank 0's outcome on every rank, in place: each draws random numbers of its own."""
    found: Tensor = tp_sync.sync(upstream.SpecTpSyncSite.DSPARK_ACCEPT_SAMPLE, outcome)
    return found


@lru_cache(maxsize=512)
def _no_trim(requests: int) -> Tensor:
    """No draft that was admitted is dropped afterwards; nobody writes to it."""
    return torch.zeros(requests, dtype=torch.int32)


def _either(chosen: Tensor, ones: Outcome, others: Outcome) -> Outcome:
    """By request: chosen [R] bool takes from `ones`."""
    return torch.where(chosen, ones[0], others[0]), torch.where(chosen, ones[1], others[1])


def _seeded(
    outcome: Outcome, drafts: Tensor, lens: Tensor, probs: Tensor, anchors: Tensor, by: Seeds
) -> Outcome:
    """The outcome with what the requests that have a seed draw by it."""
    rows = by.rows
    drawn = accept_seeded(
        drafts[rows], probs[rows], by.values, anchors[rows].long(), lens[rows] - 1, choose
    )
    return (
        outcome[0].index_copy(0, rows, drawn.accepted.to(torch.int32)),
        outcome[1].index_copy(0, rows, drawn.bonus),
    )


def _laws(lens: Tensor, starts: Tensor, logits: Tensor, sampling_info: Any) -> Tensor:
    """Plain decoding's law of every verified row: [R, max(lens), V], zero where nothing is."""
    width = int(lens.max())
    probs = torch.zeros(len(lens), width, logits.shape[1])
    at = torch.arange(width)[None, :] < lens[:, None]  # [R, width]
    rows = (starts[:, None] + torch.arange(width))[at]  # [B]
    probs[at] = target_law(logits[rows], sampling_info, lens)
    return probs


@cache
def sampled_rule() -> Rule:
    """The accept rule of sampled requests without a seed, as configured (`verify.rule`)."""
    if current_config().verify.rule == "token":
        return accept_sampled
    return partial(accept_block, walked=walk)


def _sampled(window: Tensor, lens: Tensor, probs: Tensor, draft_block: Any) -> Outcome:
    requests, width = probs.shape[:2]
    drafts = window[:, 1:width]
    draft_probs = None
    if not draft_block.greedy_draft and width > 1:
        temperature = draft_block.temperatures.reshape(-1, 1, 1)
        draft_probs = torch.softmax(
            draft_block.corrected_logits[:, : width - 1] / temperature, dim=-1
        )
    outcome = sampled_rule()(
        draft=drafts,
        draft_probs=draft_probs,
        target_probs=probs,
        # float64: of float32 uniforms one in 2^24 is 0, which accepts a draft of any probability.
        accept_uniforms=torch.rand(requests, width - 1, dtype=torch.float64),
        bonus_uniforms=torch.rand(requests, dtype=torch.float64),
        verify_lens=lens - 1,
    )
    return outcome.accepted.to(torch.int32), outcome.bonus
