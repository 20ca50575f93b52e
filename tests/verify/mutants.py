"""Wrong accept rules that the tests must catch; each is the real rule with one step changed."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.verify import Acceptance, accept_sampled, sample_inverse_cdf


def residual_skipped(
    draft: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    bonus_uniforms: Tensor,
    verify_lens: Tensor | None = None,
) -> Acceptance:
    """Correction drawn from p_t instead of the residual."""
    outcome = accept_sampled(
        draft, draft_probs, target_probs, accept_uniforms, bonus_uniforms, verify_lens
    )
    row = torch.arange(len(draft))
    weights = target_probs[row, outcome.accepted]
    return Acceptance(outcome.accepted, sample_inverse_cdf(weights, bonus_uniforms))


def bonus_off_by_one(
    draft: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    bonus_uniforms: Tensor,
    verify_lens: Tensor | None = None,
) -> Acceptance:
    """Bonus after full acceptance drawn one target row too early."""
    outcome = accept_sampled(
        draft, draft_probs, target_probs, accept_uniforms, bonus_uniforms, verify_lens
    )
    limit = torch.full_like(outcome.accepted, draft.shape[1])
    limit = limit if verify_lens is None else verify_lens
    row = torch.arange(len(draft))
    early = sample_inverse_cdf(
        target_probs[row, (outcome.accepted - 1).clamp_min(0)], bonus_uniforms
    )
    full = (outcome.accepted == limit) & (limit > 0)
    return Acceptance(outcome.accepted, torch.where(full, early, outcome.bonus))


def window_end_as_rejection(
    draft: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    bonus_uniforms: Tensor,
    verify_lens: Tensor | None = None,
) -> Acceptance:
    """The end of a shortened window treated as a rejection: residual instead of p_t there."""
    assert draft_probs is not None
    assert verify_lens is not None
    outcome = accept_sampled(
        draft, draft_probs, target_probs, accept_uniforms, bonus_uniforms, verify_lens
    )
    gamma = draft.shape[1]
    row = torch.arange(len(draft))
    cut = (outcome.accepted == verify_lens) & (verify_lens < gamma)
    behind = outcome.accepted.clamp(max=gamma - 1)
    residual = (target_probs[row, outcome.accepted] - draft_probs[row, behind]).clamp_min(0)
    weights = torch.where(
        cut[:, None] & (residual.sum(1, keepdim=True) > 0),
        residual,
        target_probs[row, outcome.accepted],
    )
    wrong = sample_inverse_cdf(weights, bonus_uniforms)
    return Acceptance(outcome.accepted, torch.where(cut, wrong, outcome.bonus))
