"""Penalised steps of odd shapes, and what the torch reference makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dspark.verify.penalties import Penalties, penalise_windows

TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Step(NamedTuple):
    """Arguments of `kernels.penalise.penalise_triton`."""

    logits: Tensor
    rows: Tensor
    window: Tensor
    table: Tensor
    slots: Tensor
    outputs: Tensor
    penalties: Penalties

    def expected(self) -> Tensor:
        """Return the reference's logits; the step's own are unchanged."""
        found = self.logits.clone()
        counts = self.table[self.slots]
        penalise_windows(found, self.rows, self.window, counts, self.outputs, self.penalties)
        return found


def steps(count: int, seed: int, device: str = "cpu") -> Iterator[Step]:
    """Yield steps of 1 to 9 requests, windows of 1 to 9 rows, vocabularies of 3 to 2,500 tokens.

    Tokens come from a small set, so that drafts repeat and are stops.
    """
    draws = torch.Generator().manual_seed(seed)
    for number in range(count):
        yield _step(number, draws, device)


def _step(number: int, draws: torch.Generator, device: str) -> Step:
    def draw(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size or (1,), generator=draws)

    requests, width = int(draw(1, 10)), int(draw(1, 10))
    vocab = int(draw(3, 2500 if number % 3 else 40))
    penalised = int(draw(1, requests + 1))
    slots = requests + int(draw(0, 4))
    logits = 8 * torch.randn(requests, width, vocab, generator=draws)
    logits[torch.rand(logits.shape, generator=draws) < 0.01] = -torch.inf
    if number % 7 == 6:
        logits[0, 0, 0] = torch.nan
    frequency, presence, repetition = _numbers(penalised, draws).to(device).split(1, dim=1)
    few = min(vocab, 6)
    where = logits.to(TYPES[number % 3]).to(device)
    return Step(
        where,
        torch.randperm(requests, generator=draws)[:penalised].to(device),
        draw(0, few, requests, width).to(device),
        draw(-2, 4, slots, vocab).clamp_min(0).int().to(device),
        torch.randperm(slots, generator=draws)[:penalised].to(device),
        draw(0, 8, penalised).to(device),
        Penalties(
            frequency,
            presence,
            repetition,
            draw(0, 12, penalised, 1).to(device),
            draw(0, few, penalised, int(draw(1, 5))).to(device),
        ),
    )


def _numbers(requests: int, draws: torch.Generator) -> Tensor:
    """Frequency, presence and repetition penalties [P, 3], uploaded as a server does."""
    choices = torch.tensor([[0.0, 0.3, -1.1, 2.0], [0.0, 0.7, -0.4, 1.3], [1.0, 1.05, 1.3, 0.8]])
    chosen = torch.randint(0, 4, (requests, 3), generator=draws)
    return choices[torch.arange(3), chosen]
