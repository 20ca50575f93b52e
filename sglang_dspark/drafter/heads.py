"""Define the sequential head: position k sees the token drafted at k-1 (paper, 3.1.2).

Each head adds to the base logits U_k a bias from the previous token: a low-rank transition matrix
(`vanilla`), the same gated by the position's hidden state (`gated`), or a small recurrent state
over the block (`rnn`). Weights and formulas are those that SGLang's DSPARK loads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.config import DrafterConfig

OUTSIDE_VOCABULARY_BIAS = -30.0
SATURATED = 40.0  # sigmoid and tanh of it are 1 in every dtype, with a derivative of 0


class MarkovHead(nn.Module):
    """Transition bias B(x_{k-1}) = W2 W1[x_{k-1}]."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(c.vocab_size, c.markov_rank)
        self.markov_w2 = nn.Linear(c.markov_rank, c.vocab_size, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """Embed token ids [...] as W1[x_{k-1}] [..., r]; also an input of the confidence head."""
        return self.markov_w1(previous)

    def start(self, rows: int) -> Tensor:
        """Return the state before the first position of `rows` blocks, [rows, r]."""
        weight = self.markov_w1.weight
        return torch.zeros(rows, weight.shape[1], device=weight.device)

    def latent(self, embedded: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of W2 [N, r] and the next state [N, r].

        embedded: W1[x_{k-1}] [N, r]; h: hidden [N, d]; state [N, r].
        """
        return embedded, state

    def bias(self, latent: Tensor) -> Tensor:
        """Map latent [..., r] to bias [..., V]."""
        return nn.functional.linear(latent, self.markov_w2.weight)


class GatedMarkovHead(MarkovHead):
    """B(x, h) = W2 (sigmoid(G [h; W1[x]]) * W1[x])."""

    def __init__(self, c: DrafterConfig):
        super().__init__(c)
        self.gate_proj = nn.Linear(c.hidden_size + c.markov_rank, c.markov_rank)

    def latent(self, embedded: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(self.gate_proj(torch.cat([h, embedded], -1)))
        return gate * embedded, state


class RNNHead(MarkovHead):
    """A gated recurrence over the block: s' = g s + (1-g) tanh(c), bias W2 tanh(o)."""

    def __init__(self, c: DrafterConfig):
        super().__init__(c)
        self.joint_proj = nn.Linear(2 * c.markov_rank + c.hidden_size, 3 * c.markov_rank)

    def latent(self, embedded: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        joint = self.joint_proj(torch.cat([state, embedded, h], -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}


def restrict_vocabulary(head: MarkovHead, allowed: Tensor) -> None:
    """Reserve the head's last rank for a reduced draft vocabulary.

    The last column of W1 is 1 for every token. That of W2 is OUTSIDE_VOCABULARY_BIAS for tokens not
    in `allowed` [n] and 0 for the others. The reduction is part of the weights, so every server
    that loads them drafts from the same distribution. Gate and recurrence are saturated there, so
    that W2 sees exactly the same constant with any head. The other columns of W2 are 0 for tokens
    not in `allowed`: readers that know the reduction skip them, and zeros compress.
    """
    with torch.no_grad():
        head.markov_w1.weight[:, -1] = 1.0
        inside = head.markov_w2.weight[allowed]
        head.markov_w2.weight.zero_()
        head.markov_w2.weight[:, -1] = OUTSIDE_VOCABULARY_BIAS
        head.markov_w2.weight[allowed, :-1] = inside[:, :-1]
        head.markov_w2.weight[allowed, -1] = 0.0
        for projection in _projections(head):
            projection.weight[-1] = 0.0
            projection.bias[-1] = SATURATED


def allowed_vocabulary(head: MarkovHead) -> Tensor | None:
    """Return the token ids [n] that the draft may propose, or None without a restriction."""
    for projection in _projections(head):
        if bool(projection.weight[-1].any()) or float(projection.bias[-1].detach()) != SATURATED:
            return None
    return restricted_tokens(head.markov_w1.weight, head.markov_w2.weight)


def _projections(head: MarkovHead) -> list[nn.Linear]:
    """Return layers whose last output, through a sigmoid or tanh, scales or is the last rank."""
    if isinstance(head, GatedMarkovHead):
        return [head.gate_proj]
    return [head.joint_proj] if isinstance(head, RNNHead) else []


def restricted_tokens(w1: Tensor, w2: Tensor) -> Tensor | None:
    """Return `allowed_vocabulary` from a vanilla head's weights, [V, r] each."""
    column = w2[:, -1]
    inside = column == 0
    outside = column == OUTSIDE_VOCABULARY_BIAS
    if not bool((w1[:, -1] == 1).all()) or not bool((inside | outside).all()):
        return None
    return inside.nonzero()[:, 0] if bool(inside.any()) else None
