"""Passes of odd shapes for the kernel that indexes their rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sglang_dspark.benchmarks.pass_rows import Pass

_LONGEST, _OWNERS = 70, 300


def passes(count: int) -> Iterator[Pass]:
    """Yield passes of 1 to 200 requests, gamma 1 to 15, with and without rows and slots left."""
    draws = torch.Generator().manual_seed(7)

    def draw(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=draws)

    for number in range(count):
        requests = int(draw(1, 200 if number % 5 == 0 else 20, 1))
        width = int(draw(2, 17, 1))
        lens = draw(1, width + 1, requests)
        indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
        spare_rows, spare_slots = (int(draw(0, 400, 1)), int(draw(0, 60, 1)))
        table = draw(1, 1 << 30, _OWNERS, _LONGEST + int(draw(0, 3, 1))).int()
        yield Pass(
            indptr,
            draw(1, 1 << 40, requests, width),
            draw(0, _LONGEST - width, requests).to(torch.int64 if number % 2 else torch.int32),
            torch.randperm(_OWNERS, generator=draws)[:requests],
            table,
            int(indptr[-1]) + spare_rows * (number % 3 > 0),
            requests + spare_slots * (number % 4 > 0),
        )
