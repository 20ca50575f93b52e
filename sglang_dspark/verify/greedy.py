"""Accept greedy drafts while they equal the target's argmax (paper, 3.1, T = 0)."""

from __future__ import annotations

from torch import Tensor

from sglang_dspark.verify.acceptance import Acceptance, leading_accepts


def accept_greedy(
    draft: Tensor,
    target_argmax: Tensor,
    verify_lens: Tensor | None = None,
    *,
    checked: bool = True,
) -> Acceptance:
    """Accept the leading drafts that the target would have chosen itself.

    draft: [R, gamma] token ids. target_argmax: [R, gamma + 1] argmax of the target after the
    anchor and after each draft; row r is read up to column l_r only, the rest is ignored.
    verify_lens: [R] int64 in 0..gamma (l_r, drafts admitted), None for gamma everywhere.
    checked: validate values, which waits for an accelerator.

    The bonus is the argmax in the column after the last accepted draft, so the emitted tokens
    are exactly those of plain greedy decoding. Raises ValueError on mismatched shapes.
    """
    rows, gamma = draft.shape
    if target_argmax.shape != (rows, gamma + 1):
        raise ValueError(
            f"target_argmax {tuple(target_argmax.shape)} must be [{rows}, {gamma + 1}]"
        )
    accepted = leading_accepts(draft == target_argmax[:, :gamma], verify_lens, checked=checked)
    bonus = target_argmax.gather(1, accepted[:, None])[:, 0]
    return Acceptance(accepted=accepted, bonus=bonus)
