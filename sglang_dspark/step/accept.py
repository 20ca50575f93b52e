"""Accept drafts of sampled requests by plain decoding's own distribution (paper, 3.1).

Used for sampled steps whose requests have seeds, or whose distribution upstream's rules
(sglang/kernels/ops/speculative/dspark/dspark_accept.py) do not keep: `rules.py`. The accept rules
are in `verify/`. The host reads no value; rows after a window's verified ones have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving.config import current_config
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.verify.acceptance import Acceptance
from sglang_dspark.verify.block import accept_block
from sglang_dspark.verify.greedy import accept_greedy
from sglang_dspark.verify.rejection import accept_sampled
from sglang_dspark.verify.sampling import sampled_distribution
from sglang_dspark.verify.seeded import accept_seeded, seeded_choice

Rule = Callable[..., Acceptance]
_AT_ONCE = 1 << 24  # probabilities: sorting needs about 30 bytes for each


def accept(
    ids: Tensor,
    lens: Tensor,
    logits: Tensor,
    draft_block: Any,
    sampling_info: Any,
    anchors: Tensor,
    seeds: Seeds | None,
) -> Acceptance:
    """Accept drafts and draw bonus tokens for each request of a sampled step.

    ids: [R, gamma + 1] int64, anchors and drafts. lens: [R] integer, tokens verified. logits:
    [R * (gamma + 1), V]. draft_block: upstream's `DraftBlockResult`. anchors: [R] the anchors'
    positions, which with a request's seed determine its tokens.
    """
    requests, width = ids.shape
    drafts, limits = ids[:, 1:], lens.long() - 1
    probs = target_probs(logits, sampling_info, width).view(requests, width, -1)
    outcome = judge(sampled_rule(), drafts, limits, probs, draft_block, anchors, seeds)
    if not sampling_info.is_any_greedy:
        return outcome
    likeliest = logits.argmax(-1).view(requests, width)
    greedy = accept_greedy(drafts, likeliest, limits, checked=False)
    return either(draft_block.greedy_mask, greedy, outcome)


def judge(
    rule: Rule,
    drafts: Tensor,
    limits: Tensor,
    probs: Tensor,
    draft_block: Any,
    anchors: Tensor,
    seeds: Seeds | None,
    choose: Callable[..., Tensor] = seeded_choice,
    *,
    checked: bool = False,
) -> Acceptance:
    """Judge drafts [R, n] by the target's distributions probs [R, n + 1, V], all as if sampled.

    rule: for requests without a seed. limits: [R] int64, drafts to judge. choose, checked: as for
    `accept_seeded`; other arguments as for `accept`.
    """
    requests, depth = drafts.shape
    outcome = rule(
        draft=drafts,
        draft_probs=_draft_probs(draft_block, depth),
        target_probs=probs,
        # float64: one float32 uniform in 2^24 is 0, which accepts a draft of any probability.
        accept_uniforms=uniforms(requests, depth, like=probs),
        bonus_uniforms=uniforms(requests, like=probs),
        verify_lens=limits,
        checked=checked,
    )
    if seeds is None:
        return outcome
    rows = seeds.rows
    given = drafts[rows], probs[rows], seeds.values, anchors[rows].long(), limits[rows]
    drawn = accept_seeded(*given, choose, checked=checked)
    return Acceptance(
        outcome.accepted.index_copy(0, rows, drawn.accepted),
        outcome.bonus.index_copy(0, rows, drawn.bonus),
    )


@cache
def sampled_rule() -> Rule:
    """Return the accept rule of sampled requests without a seed, as configured (`verify.rule`)."""
    return accept_sampled if current_config().verify.rule == "token" else accept_block


def either(chosen: Tensor, ones: Acceptance, others: Acceptance) -> Acceptance:
    """Select by request: `ones` where chosen [R] bool, else `others`."""
    return Acceptance(
        torch.where(chosen, ones.accepted, others.accepted),
        torch.where(chosen, ones.bonus, others.bonus),
    )


def target_probs(logits: Tensor, sampling_info: Any, width: int) -> Tensor:
    """Return plain decoding's distribution of every row: [R * width, V] -> the same, float32."""
    info = sampling_info
    cut = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    temperature, *cuts = (
        each.reshape(-1).repeat_interleave(width)
        for each in (info.temperatures, info.top_ks, info.top_ps, info.min_ps)
    )
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    rows = max(_AT_ONCE // logits.shape[1], 1)
    for at in range(0, len(logits), rows):
        part = slice(at, at + rows)
        top_k, top_p, min_p = (each[part] for each in cuts)
        probs[part] = sampled_distribution(
            logits[part], temperature[part], (top_k, top_p, min_p) if cut else None
        )
    return probs


def _draft_probs(draft_block: Any, depth: int) -> Tensor | None:
    """Return the distributions of the first drafts, [R, depth, V]; None: each is an argmax."""
    if draft_block.greedy_draft or depth == 0:
        return None
    temperature = draft_block.temperatures.reshape(-1, 1, 1)
    return torch.softmax(draft_block.corrected_logits[:, :depth].float() / temperature, dim=-1)


def uniforms(*shape: int, like: Tensor) -> Tensor:
    """Draw float64 in [0, 1) on the device of `like`."""
    return torch.rand(*shape, dtype=torch.float64, device=like.device)
