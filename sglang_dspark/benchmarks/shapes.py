"""Make odd shapes of a step, for tests and benchmarks of kernels that work on [R, gamma]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.kernels.admission import terms_of


class Batch(NamedTuple):
    """Arguments of an admission; see `kernels.admission.admit_triton`."""

    logits: Tensor
    terms: Tensor
    drafts: int


REQUESTS = (1, 2, 3, 17, 64, 127, 128, 129, 256)
GAMMAS = (1, 2, 5, 7, 8, 15)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def batches(device: str, seed: int = 0) -> Iterator[Batch]:
    """Yield every R with every gamma, each with and without ties; bounds and weights in turn."""
    generator = np.random.default_rng(seed)
    turn = 0
    for requests in REQUESTS:
        for gamma in GAMMAS:
            yield batch(generator, requests, gamma, turn, device)
            turn += 1


def batch(
    generator: np.random.Generator, requests: int, gamma: int, turn: int, device: str = "cpu"
) -> Batch:
    """Draw one batch.

    turn chooses: few values (many ties, zeros and ones) or values close together, weights, bounds,
    NaN, the type, rows with a stride."""
    shape = (requests, gamma)
    slopes, shifts = generator.uniform(0.1, 10.0, shape), generator.normal(0, 2, shape)
    logits = torch.from_numpy(generator.normal(0, 4, shape)).to(TYPES[turn % 5 % 3])
    if turn & 1:
        slopes, shifts = np.full(shape, 10.0), np.zeros(shape)
        logits = torch.round(logits / 4) * 4
    if turn % 7 == 5:  # survivals one unit in the last place apart
        close = 1 + 2.0**-23 * generator.integers(0, 8, shape)
        logits, slopes, shifts = torch.from_numpy(close).float(), np.ones(shape), np.zeros(shape)
    if turn % 7 == 3:
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 40.0])
        chosen = torch.from_numpy(generator.integers(0, 12, shape))
        logits = torch.where(chosen < 4, odd[chosen.clamp(max=3)].to(logits.dtype), logits)
    weights = floors = None
    limits = np.full(requests, gamma)
    if turn & 2:
        weights = (1 + 3 * generator.random(requests)).astype(np.float32)
    if turn % 3 == 2:
        limits = generator.integers(0, gamma + 1, requests)
        floors = np.minimum(limits, generator.integers(0, 2, requests))
    if turn % 4 == 1:  # the first columns of a wider tensor
        logits = torch.nn.functional.pad(logits, (0, 3))[:, :gamma]
    terms = terms_of(slopes, shifts, limits, weights, floors)
    drafts = int(generator.integers(0, requests * gamma + 2))
    return Batch(logits.to(device), terms.to(device), drafts)
