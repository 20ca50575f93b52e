"""Sample with seeds: a token is a function of its distribution, a seed and a position.

This holds whether the token is drafted or not. Gumbel's trick: of independent e_v ~ Exp(1), the
token with the least e_v / p(v) is a draw from p. Here e_v = -log u(seed, position, v), with u from
MurmurHash3 over the four words of seed, position and token, as in SGLang's seeded sampler
(sglang/srt/layers/sampler.py, `multinomial_with_seed`). So the target's choice at a position is
fixed before drafting, and verification is the greedy rule with these choices instead of the argmax.
The output is that of plain seeded decoding, token for token, independent of drafts and admission.
Drafts drawn with the same e_v agree with it with probability at least (1 - TV) / (1 + TV), TV the
distance of the two distributions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_dspark.verify.acceptance import Acceptance
from sglang_dspark.verify.greedy import accept_greedy

_WORD = 0xFFFFFFFF
_AT_ONCE = 1 << 22  # variates: each needs some 50 bytes while computed
LEAST_WAIT = 2.0**-32  # a wait of 0, from u = 1, is raised to that of the next smaller u


def waits(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return e_v of rows: seeds, positions [N], tokens [n] or [N, n], int64 -> [N, n] float64 > 0.

    A position is that of the last token before the draw.
    """
    state = torch.zeros_like(seeds)
    for word in (seeds & _WORD, (seeds >> 32) & _WORD, positions & _WORD):
        state = _mixed(state, word)
    hashed = _final(_mixed(state[:, None], tokens & _WORD))
    return -(hashed.double() / _WORD).log().clamp(torch.finfo(torch.float64).min, -LEAST_WAIT)


def seeded_choice(probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token per row: probs [N, n] of any scale, seeds, positions [N] int64 -> [N] int64.

    Of equal waits the lowest token is drawn; a token of probability zero never is.
    """
    tokens = torch.arange(probs.shape[1], device=probs.device)
    rows = rows_at_once(len(tokens))
    parts = (slice(at, at + rows) for at in range(0, len(probs), rows))
    chosen = [_first_arrival(probs[part], seeds[part], positions[part], tokens) for part in parts]
    return torch.cat(chosen)


def rows_at_once(tokens: int) -> int:
    """Return the number of rows of `waits`, of `tokens` tokens each, that fit in little memory."""
    return max(_AT_ONCE // tokens, 1)


def _first_arrival(probs: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    race = waits(seeds, positions, tokens) / probs.double()
    return race.masked_fill(probs <= 0, torch.inf).argmin(dim=1)


def accept_seeded(
    draft: Tensor,
    target_probs: Tensor,
    seeds: Tensor,
    anchors: Tensor,
    verify_lens: Tensor | None = None,
    choose: Callable[[Tensor, Tensor, Tensor], Tensor] = seeded_choice,
    *,
    checked: bool = True,
) -> Acceptance:
    """Accept the leading drafts that are the target's own seeded choices.

    draft: [R, gamma] int64. target_probs: [R, gamma + 1, V]; row r is read up to index l_r only.
    seeds: [R] int64. anchors: [R] int64, positions of the anchors. verify_lens: [R] int64 in
    0..gamma, None for gamma everywhere. choose: a faster `seeded_choice`. checked: validate values,
    which waits for an accelerator. Raises ValueError on mismatched shapes.
    """
    width = target_probs.shape[1]
    positions = anchors[:, None] + torch.arange(width, device=anchors.device)  # [R, gamma + 1]
    choice = choose(target_probs.flatten(0, 1), seeds.repeat_interleave(width), positions.flatten())
    return accept_greedy(draft, choice.view(-1, width), verify_lens, checked=checked)


def _mixed(state: Tensor, word: Tensor) -> Tensor:
    """Mix a 32-bit word into a 32-bit state, MurmurHash3's step; both int64."""
    word = (word * 0xCC9E2D51) & _WORD
    word = ((word << 15) | (word >> 17)) & _WORD
    state = state ^ ((word * 0x1B873593) & _WORD)
    state = ((state << 13) | (state >> 19)) & _WORD
    return (state * 5 + 0xE6546B64) & _WORD


def _final(state: Tensor) -> Tensor:
    """Complete MurmurHash3 after 16 bytes."""
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _WORD
    return state ^ (state >> 16)
