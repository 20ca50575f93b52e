"""Odd shapes of a step, the same for tests and benchmarks of kernels that work on [R, gamma]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Arguments of an admission; see `kernels.admission.admit_triton`."""

    confidence: Tensor
    drafts: Tensor
    weights: Tensor | None
    limits: Tensor | None
    floors: Tensor | None


REQUESTS = (1, 2, 3, 17, 64, 127, 128, 129, 256)
GAMMAS = (1, 2, 5, 7, 8, 15)


def batches(device: str, seed: int = 0) -> Iterator[Batch]:
    """Every R with every gamma, each with ties or without, with bounds and weights in turn."""
    generator = torch.Generator().manual_seed(seed)
    turn = 0
    for requests in REQUESTS:
        for gamma in GAMMAS:
            yield batch(generator, requests, gamma, turn, device)
            turn += 1


def batch(
    generator: torch.Generator, requests: int, gamma: int, turn: int, device: str = "cpu"
) -> Batch:
    """One batch. turn chooses by its bits: coarse confidences (many ties), weights, bounds."""
    confidence = torch.rand(requests, gamma, generator=generator)
    if turn & 1:
        confidence = torch.round(confidence * 4) / 4  # ties, zeros and ones
    weights = limits = floors = None
    if turn & 2:
        weights = 1 + 3 * torch.rand(requests, generator=generator)
    if turn % 3 == 2:
        limits = torch.randint(0, gamma + 1, (requests,), generator=generator).int()
        floors = torch.minimum(limits, torch.randint(0, 2, (requests,), generator=generator).int())
    drafts = torch.randint(0, requests * gamma + 2, (1,), generator=generator)
    parts = (confidence, drafts, weights, limits, floors)
    return Batch(*(None if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]
