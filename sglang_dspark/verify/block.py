"""Accept sampled drafts by judging a window as a whole (block verification).

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding": the output distribution is
that of `rejection.py`, with never fewer drafts kept.

The rule computes the chance that drafts 1..i are kept: p_0 = 1, p_i = min(1, p_{i-1} p_t(x_i) /
p_d(x_i)). A draft that is more likely under the target than under the drafter makes up for an
earlier one that is less likely; the rule token by token multiplies min(1, p_t / p_d). Let S_i =
sum_x max(p_i p_t(x) - p_d(x), 0), both distributions after draft i, and l the verify length. The
last i with u_i < h_i is kept: h_l = p_l, and h_i = S_i / (S_i + 1 - p_i) before it. After i < l
follows a draw from max(p_i p_t - p_d, 0), normalised; after l one from p_t. docs/losslessness.md
has the proof.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_dspark.verify.acceptance import Acceptance, window_limits
from sglang_dspark.verify.rejection import (
    accept_sampled,
    check_shapes,
    mass_of,
    sample_inverse_cdf,
)

# (draft, draft_probs, target_probs, accept_uniforms, limits) -> accepted and p_tau, both [R]
Walk = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def accept_block(
    draft: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    bonus_uniforms: Tensor,
    verify_lens: Tensor | None = None,
    *,
    checked: bool = True,
    walked: Walk | None = None,
) -> Acceptance:
    """Accept drafts so that the emitted tokens follow the target's distribution exactly.

    Arguments, errors and arithmetic are those of `rejection.accept_sampled`. Drafts that are argmax
    choices (draft_probs None) use that rule: for them both rules give one distribution, since p_t /
    p_d never exceeds 1. walked: a faster `walk`.
    """
    gamma = draft.shape[1]
    given = draft, draft_probs, target_probs, accept_uniforms, bonus_uniforms
    if draft_probs is None or gamma == 0:
        return accept_sampled(*given, verify_lens, checked=checked)
    check_shapes(*given)
    limits = window_limits(verify_lens, draft, checked=checked)  # [R]
    found = draft, draft_probs, target_probs, accept_uniforms, limits
    accepted, chance = walk(*found, checked=checked) if walked is None else walked(*found)
    row = torch.arange(len(draft), device=draft.device)
    weights = target_probs[row, accepted].double()  # [R, V]
    proposal = draft_probs[row, accepted.clamp(max=gamma - 1)]
    residual = _residual(weights, chance, proposal)
    # The residual is empty if the distributions differ by rounding only: use the target's then.
    drawn_from_rest = (accepted < limits) & (residual.sum(1) > 0)
    weights = torch.where(drawn_from_rest[:, None], residual, weights)
    bonus = sample_inverse_cdf(weights, bonus_uniforms, checked=checked)
    return Acceptance(accepted=accepted, bonus=bonus)


def standing(draft: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Return p_0 .. p_gamma [R, gamma + 1] float64: the chance that given drafts 1..i are kept.

    It holds for every verify length of i or more (docs/losslessness.md). draft: [R, gamma].
    draft_probs: [R, gamma, V]. target_probs: [R, gamma or more, V].
    """
    gamma = draft.shape[1]
    wanted = mass_of(draft, target_probs[:, :gamma])  # [R, gamma]
    proposed = mass_of(draft, draft_probs)
    chances = [torch.ones(len(draft), dtype=torch.float64, device=draft.device)]
    for i in range(gamma):
        mass = chances[-1] * wanted[:, i]
        enough = (mass > 0).double()  # 0 / 0 keeps nothing: the token has no target probability
        chances.append(torch.where(mass < proposed[:, i], mass / proposed[:, i], enough))
    return torch.stack(chances, dim=1)


def walk(
    draft: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    limits: Tensor,
    *,
    checked: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return tau [R] int64, the last i of a window with u_i < h_i, else 0, and p_tau [R] float64.

    limits: [R] int64, l. The walk starts from the end, so that S_i is summed only for rows without
    a kept draft after i. Unless `checked` it is summed for all rows, because selecting rows waits
    for an accelerator.
    """
    chances = standing(draft, draft_probs, target_probs)  # [R, gamma + 1]
    last = (limits - 1).clamp_min(0)[:, None]
    whole = uniforms.gather(1, last) < chances.gather(1, limits[:, None])  # [R, 1]
    accepted = torch.where(whole[:, 0], limits, 0)  # [R]
    every = torch.arange(len(limits), device=limits.device)
    for i in range(draft.shape[1] - 1, 0, -1):
        open_ = (accepted == 0) & (limits > i)  # [R]
        rows = every[open_] if checked else every
        chance = chances[rows, i]
        left = _residual(target_probs[rows, i].double(), chance, draft_probs[rows, i]).sum(1)  # S_i
        refused = left + (1.0 - chance)
        # 0 / 0: the distributions agree to rounding, so draft i is kept.
        kept = (uniforms[rows, i - 1] * refused < left) | (refused == 0)
        accepted[rows] = torch.where(kept & open_[rows], i, accepted[rows])
    return accepted, chances[every, accepted]


def _residual(target: Tensor, chance: Tensor, proposal: Tensor) -> Tensor:
    """Return max(chance * target - proposal, 0) [r, V] float64; target: float64."""
    return (chance[:, None] * target - proposal.double()).clamp_min(0.0)
