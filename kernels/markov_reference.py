"""Compute the float64 reference of markov_sample.py by position, rounding where that rounds.

Given drafts it returns each position's tokens for the drafts before it, so one draft that rounding
decides does not change the comparison of the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dspark.kernels.markov_blocks import Blocks, Mixing

_ROUNDS = 10


class Reference(NamedTuple):
    """tokens: [R, gamma] int64, each position's choice. keys: [R, gamma, n] float64; the choice has
    the largest. logits: [R, gamma, n] in the step's type. confidence: [R, gamma] float64."""

    tokens: Tensor
    keys: Tensor
    logits: Tensor
    confidence: Tensor | None


def markov_torch(given: Blocks, drafts: Tensor | None = None) -> Reference:
    """Compute the steps after the given drafts [R, gamma] if any, else after its own drafts."""
    previous, state = given.anchors, torch.zeros_like(given.w1[given.anchors], dtype=torch.float64)
    found = []
    for k in range(given.base.shape[1]):
        embedded = given.w1[previous]
        latent, state = _latent(given.mixing, k, embedded, state)
        bias = (latent.double() @ given.w2.double().T).to(given.w2.dtype)
        logits = (given.base[:, k].float() + bias.float()).to(given.step_dtype)
        keys = logits.double()
        if given.temperatures is not None:
            keys = _raced(given, keys, k)
        columns = keys.argmax(-1)
        chosen = columns if given.draft_ids is None else given.draft_ids[columns]
        found.append((chosen, keys, logits, _confidence(given, k, embedded)))
        previous = chosen if drafts is None else drafts[:, k]
    all_steps = Reference(*(torch.stack(part, 1) for part in zip(*found, strict=True)))
    return all_steps if given.judge else all_steps._replace(confidence=None)


def _latent(
    mixing: Mixing | None, k: int, embedded: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the input of W2 [R, r] in the weights' type, and the next state [R, r] float64."""
    if mixing is None:
        return embedded, state
    dtype, inputs = embedded.dtype, embedded.double()
    if mixing.recurrent:
        inputs = torch.cat([state.float().to(dtype).double(), inputs], -1)
    projected = mixing.from_hidden[:, k].double() + inputs @ mixing.weight.double().T
    if not mixing.recurrent:
        return (torch.sigmoid(projected) * embedded.double()).float().to(dtype), state
    gate, candidate, output = projected.chunk(3, -1)
    gate = torch.sigmoid(gate)
    state = gate * state + (1 - gate) * torch.tanh(candidate)
    return torch.tanh(output).float().to(dtype), state


def _confidence(given: Blocks, k: int, embedded: Tensor) -> Tensor:
    """Return confidence logits [R] float64; empty without a confidence head."""
    if given.judge is None:
        return embedded.new_zeros(0)
    features, weight = given.judge.features[:, k], given.judge.weight.double()
    inputs = features.double()
    if len(weight) > features.shape[-1]:
        inputs = torch.cat([inputs, embedded.to(features.dtype).double()], -1)
    return inputs @ weight + given.judge.bias.double()


def _raced(given: Blocks, logits: Tensor, k: int) -> Tensor:
    """Return logits / T - log e for requests with a temperature [R, n]; else the logits."""
    assert given.temperatures is not None
    assert given.noise is not None
    rows, width = logits.shape
    device = logits.device
    quads = torch.arange((width + 3) // 4, device=device)
    words = philox(
        given.noise.key,
        quads.expand(rows, -1),
        torch.arange(rows, device=device)[:, None].expand(rows, len(quads)),
        torch.full((rows, len(quads)), k, device=device),
        (given.noise.offset & 0xFFFFFFFF).expand(rows, len(quads)),
    )
    word = torch.stack(words, -1).view(rows, -1)[:, :width]
    u = (word.float() + 0.5) * 2.0**-32
    hot = (given.temperatures != 0)[:, None]
    scale = torch.where(hot, given.temperatures[:, None], 1.0).double()
    race = logits / scale - (-torch.log1p(-u.double())).log()
    return torch.where(hot, race, logits)


def philox(key: int, *counter: Tensor) -> tuple[Tensor, ...]:
    """Compute Philox4x32-10 (Salmon et al., SC 2011): four words (int64, 0 <= w < 2^32) of each
    counter of four such words, all of one shape."""
    low, high = key & 0xFFFFFFFF, key >> 32
    a, b, c, d = counter
    for turn in range(_ROUNDS):
        one, two = (low + turn * 0x9E3779B9), (high + turn * 0xBB67AE85)
        (over_a, under_a), (over_c, under_c) = _product(a, 0xD2511F53), _product(c, 0xCD9E8D57)
        a, b = over_c ^ b ^ (one & 0xFFFFFFFF), under_c
        c, d = over_a ^ d ^ (two & 0xFFFFFFFF), under_a
    return a, b, c, d


def _product(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return high and low words of a product with a 32-bit factor, which int64 cannot hold."""
    below, above = words * (factor & 0xFFFF), words * (factor >> 16)
    middle = above + (below >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (below & 0xFFFF)
