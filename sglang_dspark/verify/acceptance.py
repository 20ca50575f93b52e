"""Define the outcome of a verify step, common to the greedy and the sampled accept rules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """Tokens that a verify step emits for each request: `accepted` drafts, then one bonus token.

    accepted: [R] int64, number of accepted drafts, 0 <= accepted_r <= l_r.
    bonus:    [R] int64, the target's own token after them: the correction after a rejection,
              the bonus after full acceptance.
    """

    accepted: Tensor  # [R]
    bonus: Tensor  # [R]

    def __post_init__(self) -> None:
        if self.accepted.dim() != 1 or self.accepted.shape != self.bonus.shape:
            raise ValueError(
                f"accepted {tuple(self.accepted.shape)} and bonus {tuple(self.bonus.shape)} "
                "must both be [R]"
            )

    @property
    def emitted(self) -> Tensor:
        """Return the number of tokens emitted by the step, bonus included: [R] int64, >= 1."""
        return self.accepted + 1

    def tokens(self, draft: Tensor) -> Tensor:
        """Return the emitted tokens, left-aligned: [R, gamma + 1] int64.

        draft: [R, gamma]. Row r holds its accepted drafts and then the bonus; entries from
        `emitted[r]` on repeat the bonus and must be ignored.
        """
        gamma = draft.shape[1]
        column = torch.arange(gamma + 1, device=draft.device)  # [gamma + 1]
        padded = torch.cat([draft, draft.new_zeros(draft.shape[0], 1)], dim=1)
        keep = column[None, :] < self.accepted[:, None]  # [R, gamma + 1]
        return torch.where(keep, padded, self.bonus[:, None])


def leading_accepts(accept: Tensor, verify_lens: Tensor | None, *, checked: bool = True) -> Tensor:
    """Count the leading accepted drafts inside each verify window.

    accept: [R, gamma] bool, the verdict on each draft by itself.
    verify_lens: [R] int64 in 0..gamma, drafts admitted; None means gamma for every row.
    checked: validate the lengths' values, which waits for an accelerator.
    Returns [R] int64. If checked, raises ValueError if a verify length is outside 0..gamma.
    """
    if verify_lens is not None:
        limits = window_limits(verify_lens, accept, checked=checked)
        column = torch.arange(accept.shape[1], device=accept.device)
        accept = accept & (column[None, :] < limits[:, None])
    return accept.to(torch.int64).cumprod(dim=1).sum(dim=1)


def window_limits(verify_lens: Tensor | None, draft: Tensor, *, checked: bool = True) -> Tensor:
    """Return the drafts admitted per row of draft [R, gamma], gamma without verify_lens: [R] int64.

    Raises ValueError on lengths of another shape and, if `checked`, outside 0..gamma.
    """
    rows, gamma = draft.shape
    if verify_lens is None:
        return torch.full((rows,), gamma, dtype=torch.int64, device=draft.device)
    if verify_lens.shape != (rows,):
        raise ValueError(f"verify_lens {tuple(verify_lens.shape)} must be [{rows}]")
    if checked and bool(((verify_lens < 0) | (verify_lens > gamma)).any()):
        raise ValueError(f"verify lengths must lie in 0..{gamma}: {verify_lens.tolist()}")
    return verify_lens.to(torch.int64)
