"""Sample draft tokens and return the exact distribution that each was drawn from.

Rejection sampling is lossless only for the distribution that a draft was really drawn from (paper,
3.1), so every drafter samples its tokens here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draft_distribution(logits: Tensor, greedy: Tensor, temperature: Tensor) -> Tensor:
    """Return softmax(logits / T) [R, V'], one-hot at `greedy` [R] where temperature [R] is 0."""
    hot = temperature > 0
    scale = torch.where(hot, temperature, torch.ones_like(temperature))
    distribution = torch.softmax(logits.float() / scale[:, None], -1)
    one_hot = torch.nn.functional.one_hot(greedy, logits.shape[-1]).to(distribution.dtype)
    return torch.where(hot[:, None], distribution, one_hot)


def choose(
    logits: Tensor, temperature: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None]:
    """Sample one column per row of logits [R, V']; return it and its distribution [R, V'].

    temperature [R]: rows at 0 take the argmax; None: all do, and the distribution is None.
    """
    chosen = logits.argmax(-1)
    if temperature is None:
        return chosen, None
    distribution = draft_distribution(logits, chosen, temperature)
    return torch.multinomial(distribution, 1, generator=generator)[:, 0], distribution


def over_vocabulary(distribution: Tensor, draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Expand a distribution over a draft vocabulary [..., V'] to all tokens [..., V], 0 outside.

    draft_ids [V']: token id of each column; None if the columns are the token ids.
    """
    if draft_ids is None:
        return distribution
    full = distribution.new_zeros(*distribution.shape[:-1], vocab_size)
    return full.index_copy_(-1, draft_ids, distribution)
