"""Make projected rows of odd shapes for `kernels.commit_write`, for tests and benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dspark.kernels.commit_write import DraftLayers

# Heads, numbers of each, and rotated numbers.
ROWS = ((1, 2, 2), (2, 16, 16), (3, 16, 8), (1, 24, 24), (2, 80, 32), (5, 12, 6), (8, 64, 64))
CACHES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
GIVEN = (torch.float32, torch.bfloat16, torch.float16)
LONGEST = 300  # positions
UNTOUCHED = -7.0  # content of caches before
MOST = 1.01  # of `difference`, between a kernel and its reference


class Written(NamedTuple):
    """Arguments of `write_triton`."""

    layers: DraftLayers
    projected: Tensor
    cos_sin: Tensor
    positions: Tensor
    slots: Tensor


def cases(count: int, seed: int = 0, device: str = "cpu") -> Iterator[Written]:
    """Yield `count` cases of 0 to 7 rows, 1 to 3 layers and every pair of types."""
    generator = torch.Generator().manual_seed(seed)
    for turn in range(count):
        rows = int(torch.randint(8, (1,), generator=generator))
        yield case(generator, rows, 1 + turn % 3, ROWS[turn % len(ROWS)], turn, device)


def case(
    generator: torch.Generator,
    rows: int,
    layers: int,
    sizes: tuple[int, int, int],
    turn: int,
    device: str = "cpu",
) -> Written:
    """Draw one launch. turn chooses types, rotation, scales, strides, and rows of no request."""
    heads, size, rotary = sizes
    written = _layers(generator, rows + 5, layers, (heads, size), turn, device)
    width = layers * 2 * heads * size
    projected = torch.randn(rows, width + turn % 7 // 6, generator=generator)
    projected *= 10 ** (2 * torch.rand(rows, 1, generator=generator) - 1)
    if turn % 8 == 7:  # FP8, and values beyond its range
        projected *= 100
    angles = torch.rand(LONGEST, rotary // 2, generator=generator) * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(LONGEST, (rows,), generator=generator)
    slots = torch.randperm(rows + 4, generator=generator)[:rows] + 1
    nobodys = torch.rand(rows, generator=generator) < (0.0, 0.3, 0.3, 1.0)[turn // 5 % 4]
    slots[nobodys] = torch.randint(-2, 1, (rows,), generator=generator)[nobodys]
    projected[nobodys] = torch.nan
    positions[nobodys] = 0
    moved = projected.to(GIVEN[turn // 3 % 3])[:, :width].to(device)
    moved = moved if turn % 7 == 6 else moved.contiguous()
    cos_sin = cos_sin.to(torch.bfloat16 if turn % 11 == 3 else torch.float32).to(device)
    return Written(written, moved, cos_sin, positions.to(device), slots.to(device))


def _layers(
    generator: torch.Generator,
    places: int,
    layers: int,
    row: tuple[int, int],
    turn: int,
    device: str,
) -> DraftLayers:
    """Make caches of `places` slots filled with `UNTOUCHED`; row: heads, size."""
    heads, size = row
    caches = []
    for _ in range(2 * layers):
        # Views of larger rows now and then, as in a pool that several models share.
        whole = torch.full((places, heads + turn % 5 // 4, size), UNTOUCHED, device=device)
        caches.append(whole.to(CACHES[turn % 4])[:, :heads])
    scaled = torch.rand(layers, 2, generator=generator) + 0.5 if turn % 3 == 1 else None
    norms = torch.rand(layers, size, generator=generator) + 0.5
    return DraftLayers(
        caches[:layers],
        caches[layers:],
        norms.to(GIVEN[turn // 2 % 3]).to(device),
        (torch.ones(layers, 2) if scaled is None else scaled).to(device),
        epsilon=1e-6 if turn % 2 else 1e-2,
        neox=turn // 4 % 3 != 2,
    )


def copied(given: Written) -> Written:
    """Copy the launch: its own caches with the same content."""
    own = replace(
        given.layers,
        keys=[each.clone() for each in given.layers.keys],
        values=[each.clone() for each in given.layers.values],
    )
    return given._replace(layers=own)


def difference(found: Written, expected: Written) -> float:
    """Return the largest difference of cached numbers, in units in the last place of their type.

    A unit is at least 1e-6 of the row's norm. Infinite where only one is NaN."""
    worst = 0.0
    for name in ("keys", "values"):
        pairs = zip(getattr(found.layers, name), getattr(expected.layers, name), strict=True)
        for mine, other in pairs:
            worst = max(worst, _units(mine, other))
    return worst


_DIGITS = {torch.float32: 20, torch.bfloat16: 7, torch.float16: 10, torch.float8_e4m3fn: 3}
_LEAST = {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}  # steps among subnormal numbers


def _units(mine: Tensor, other: Tensor) -> float:
    a, b = mine.double(), other.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    sizes = torch.maximum(a.abs(), b.abs()).nan_to_num()
    unit = sizes * 2.0 ** -_DIGITS[mine.dtype] + _LEAST.get(mine.dtype, 0.0)
    # A key is a sum of two products: cancellation leaves the rounding of float32.
    unit += 1e-6 * sizes.amax(-1, keepdim=True) + 1e-30
    return float(((a - b).nan_to_num().abs() / unit).max()) if a.numel() else 0.0
