"""Windows of odd shapes for `kernels.commit_rows`, the same for its tests and its benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

FEATURES = (1, 7, 64, 96, 1000, 4096, 4097, 12_800)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Windows(NamedTuple):
    """Arguments of `pack_triton`."""

    hidden: Tensor
    emitted: Tensor
    lens: Tensor
    slots: Tensor
    rows: int


def windows(count: int, seed: int = 0, device: str = "cpu") -> Iterator[Windows]:
    """`count` of 1 to 40 requests and 1 to 8 drafts; wide rows now and then."""
    generator = torch.Generator().manual_seed(seed)
    for turn in range(count):
        features = FEATURES[turn % len(FEATURES)]
        most = 5 if features > 100 else 41
        requests = int(torch.randint(1, most, (1,), generator=generator))
        yield step(generator, requests, 1 + turn % 8, features, turn, device)


def step(
    generator: torch.Generator,
    requests: int,
    gamma: int,
    features: int,
    turn: int,
    device: str = "cpu",
) -> Windows:
    """One step. turn chooses: the type, requests that emit nothing, rows left over or too few, a
    stride; rejected rows are no numbers."""
    width = gamma + 1
    hidden = torch.randn(requests, width, features, generator=generator).to(TYPES[turn % 3])
    emitted = torch.randint(int(turn % 4 != 1), width + 1, (requests,), generator=generator).int()
    hidden[torch.arange(width) >= emitted[:, None]] = torch.nan
    flat = hidden.view(requests * width, features)
    if turn % 5 == 2:
        flat = torch.nn.functional.pad(flat, (0, 3))[:, :features]
    lens = torch.randint(0, 9000, (requests,), generator=generator)
    slots = torch.randint(1, 1 << 40, (requests, width), generator=generator)
    rows = max(1, int(emitted.sum()) + (0, 3, 40, -2)[turn % 4])
    flat, emitted, lens, slots = (part.to(device) for part in (flat, emitted, lens, slots))
    return Windows(flat, emitted, lens, slots, rows)
