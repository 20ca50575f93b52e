"""Accept sampled drafts by chain rejection sampling (Leviathan et al. 2023; paper, 3.1, T > 0).

Draft x_k ~ p_d is kept with probability min(1, p_t(x_k) / p_d(x_k)). After the first rejection the
correction is drawn from the normalised residual max(p_t - p_d, 0). A row whose whole verify window
was accepted draws its bonus from p_t itself. All randomness is passed as uniforms, so a result is a
deterministic function of the arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.verify.acceptance import Acceptance, leading_accepts


def accept_sampled(
    draft: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    bonus_uniforms: Tensor,
    verify_lens: Tensor | None = None,
    *,
    checked: bool = True,
) -> Acceptance:
    """Accept drafts so that the emitted tokens follow the target's distribution exactly.

    draft: [R, gamma] token ids, row r sampled from draft_probs[r, 0], draft_probs[r, 1], ...
    draft_probs: [R, gamma, V], the distribution each draft was really sampled from. None means
        that the drafts are argmax choices, whose distribution is one-hot.
    target_probs: [R, gamma + 1, V] from `sampling.target_distribution`; row r is read up to
        index l_r only. One-hot rows (T = 0) give the greedy rule.
    accept_uniforms: [R, gamma] in [0, 1). bonus_uniforms: [R] in [0, 1). They must be
        independent of each other and of the drafts.
    verify_lens: [R] int64 in 0..gamma (l_r, drafts admitted), None for gamma everywhere.
    checked: validate values, which waits for an accelerator.

    Ratios and residuals are formed in float64, where the product of two float32 numbers is
    exact. Raises ValueError on mismatched shapes.
    """
    rows, gamma = draft.shape
    check_shapes(draft, draft_probs, target_probs, accept_uniforms, bonus_uniforms)
    drafted_mass = mass_of(draft, target_probs[:, :gamma])
    proposal_mass = 1.0 if draft_probs is None else mass_of(draft, draft_probs)
    accept = accept_uniforms.double() * proposal_mass < drafted_mass  # [R, gamma]
    accepted = leading_accepts(accept, verify_lens, checked=checked)

    weights = target_probs[torch.arange(rows, device=draft.device), accepted].double()  # [R, V]
    if gamma > 0:
        rejected = accepted < (gamma if verify_lens is None else verify_lens)  # [R]
        residual = _residual(weights, draft, draft_probs, accepted.clamp(max=gamma - 1))
        weights = torch.where(rejected[:, None], residual, weights)
    bonus = sample_inverse_cdf(weights, bonus_uniforms, checked=checked)
    return Acceptance(accepted=accepted, bonus=bonus)


def sample_inverse_cdf(weights: Tensor, uniforms: Tensor, *, checked: bool = True) -> Tensor:
    """Draw one index per row with probability proportional to its weight.

    weights: [R, V] non-negative, not all zero in a row, any scale. uniforms: [R] in [0, 1). Returns
    [R] int64: the first index whose cumulative weight exceeds uniform * total. An index of weight
    zero is never drawn, under any rounding. If `checked`, which waits for an accelerator, raises
    ValueError if a row has no mass; otherwise such a row gives any index.
    """
    cumulative = weights.double().cumsum(dim=1)  # [R, V]
    total = cumulative[:, -1].contiguous()
    if checked and not bool((total > 0).all()):
        raise ValueError("sample_inverse_cdf: a row has no probability mass (zero or NaN)")
    threshold = uniforms.double() * total  # [R]
    index = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
    # uniform * total can round up to the total; the last index that carries mass is then right.
    last = torch.searchsorted(cumulative, total[:, None])[:, 0]
    return torch.minimum(index, last).clamp(max=weights.shape[1] - 1)


def mass_of(draft: Tensor, probs: Tensor) -> Tensor:
    """Return the probability [R, gamma] float64 of each draft [R, gamma] in probs [R, gamma, V]."""
    return probs.gather(2, draft[:, :, None])[:, :, 0].double()


def _residual(
    target_row: Tensor, draft: Tensor, draft_probs: Tensor | None, step: Tensor
) -> Tensor:
    """Return max(p_t - p_d, 0) at draft `step` of each row, or p_t if rounding leaves no mass.

    target_row: [R, V] float64. draft: [R, gamma]. step: [R] in 0..gamma - 1.
    Returns [R, V] float64, not normalised.
    """
    if draft_probs is None:
        rejected_token = draft.gather(1, step[:, None])  # [R, 1]
        residual = target_row.scatter(1, rejected_token, 0.0)
    else:
        row = torch.arange(len(draft), device=draft.device)
        residual = (target_row - draft_probs[row, step].double()).clamp_min(0.0)
    empty = residual.sum(dim=1, keepdim=True) <= 0  # [R, 1]
    return torch.where(empty, target_row, residual)


def check_shapes(
    draft: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    bonus_uniforms: Tensor,
) -> None:
    """Raise ValueError if the shapes of an accept rule's arguments do not match."""
    rows, gamma = draft.shape
    vocab = target_probs.shape[-1]
    expected: list[tuple[str, Tensor, tuple[int, ...]]] = [
        ("target_probs", target_probs, (rows, gamma + 1, vocab)),
        ("accept_uniforms", accept_uniforms, (rows, gamma)),
        ("bonus_uniforms", bonus_uniforms, (rows,)),
    ]
    if draft_probs is not None:
        expected.append(("draft_probs", draft_probs, (rows, gamma, vocab)))
    for name, tensor, shape in expected:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
