"""Odd shapes of the grouped GEMMs, the same for tests and benchmarks: groups of every kind, widths
that no tile divides, padding behind the groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class GroupedShape(NamedTuple):
    """A ragged product. counts: rows of each expert; padding: rows behind them; N and K."""

    name: str
    counts: tuple[int, ...]
    padding: int
    columns: int
    inner: int

    @property
    def rows(self) -> int:
        """M, padding included."""
        return sum(self.counts) + self.padding

    def offsets(self, device: str = "cpu") -> Tensor:
        """[E+1] int32."""
        return torch.tensor([0, *self.counts], dtype=torch.int32).cumsum(0).int().to(device)


def grouped_shapes() -> Iterator[GroupedShape]:
    """Small enough for an interpreter, ragged enough for a kernel."""
    yield GroupedShape("one token", (0, 0, 1, 0), 0, 128, 128)
    yield GroupedShape("decode, top-2 of 8", (1, 0, 3, 2, 0, 1, 4, 1), 0, 96, 160)
    yield GroupedShape("all to one expert", (0, 0, 37, 0), 0, 130, 128)
    yield GroupedShape("first and last empty", (0, 17, 16, 0), 0, 64, 72)
    yield GroupedShape("unaligned everything", (5, 33, 1), 0, 201, 135)
    yield GroupedShape("padding behind", (3, 0, 20), 13, 48, 264)
    yield GroupedShape("padding only", (0, 0), 9, 33, 40)
    yield GroupedShape("one expert, exact tiles", (64,), 0, 128, 256)
    yield GroupedShape("large groups", (150, 0, 110), 6, 136, 144)
    yield GroupedShape("no tokens", (0, 0, 0), 0, 128, 128)
    yield GroupedShape("no columns", (2, 3), 0, 0, 64)
