"""Draft logits of odd shapes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def drafts(count: int, seed: int, device: str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits [R, gamma, n] and temperatures [R]: sure and unsure rows, rows without a token,
    rows with NaN, buffers for more requests and wider rows."""
    draws = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draws))

    for number in range(count):
        requests, gamma = draw(1, 20), draw(1, 9)
        vocab = draw(1, 3000 if number % 3 else 20)
        room = torch.randn(requests + draw(0, 3), gamma, vocab + 3, generator=draws)
        room *= 10 ** (torch.rand(room.shape[:2], generator=draws)[..., None] * 2 - 0.5)
        room[torch.rand(room.shape, generator=draws) < 0.1] = -torch.inf
        if number % 5 == 4:
            room[0, 0] = -torch.inf
            room[-1, -1, 0] = torch.nan
        temperatures = torch.rand(requests, generator=draws) * 2
        temperatures[torch.rand(requests, generator=draws) < 0.3] = 0.0
        logits = room.to(TYPES[number % 3]).to(device)[:requests]
        yield (logits[..., :vocab] if number % 2 else logits[..., 3:]), temperatures.to(device)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of probabilities; infinite where only one is NaN.

    The reference rounds 1 - p in units of 6e-8: of sure positions only probabilities compare.
    """
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    apart = (found.double().sigmoid() - expected.double().sigmoid()).abs()
    return float(apart.nan_to_num(0.0).max())
