"""Make steps of odd shapes for `kernels.accept_greedy`, for its tests and its benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dspark.kernels.accept_greedy import TYPES, Emitted

VOCABULARIES = (2, 3, 17, 64, 127, 129, 257, 1000, 2048, 2049, 8192, 20_000)


class Step(NamedTuple):
    """Arguments of `accept_greedy_torch`; all but width also of `accept_greedy_triton`."""

    ids: Tensor
    rows: Tensor
    logits: Tensor
    lens: Tensor
    width: int


def steps(count: int, seed: int = 0, device: str = "cpu") -> Iterator[Step]:
    """Yield `count` steps of 1 to 9 requests and 1 to 8 drafts, some with a large vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    for turn in range(count):
        vocab = VOCABULARIES[turn // 9 % len(VOCABULARIES)]
        yield step(generator, 1 + turn % 9, 1 + turn % 8, vocab, turn, device)


def step(
    generator: torch.Generator,
    requests: int,
    gamma: int,
    vocab: int,
    turn: int,
    device: str = "cpu",
) -> Step:
    """Make one step; three in four drafts are the target's choice.

    turn chooses: few values (ties), rows of NaN or -inf, the type, rows with a stride, an empty
    slot. Rows after the last request's, which fill a graph's size, must not be read.
    """
    width = gamma + 1
    rows = torch.randint(1, width + 1, (requests,), generator=generator)
    if turn % 4 == 3:
        rows[-1] = 0
    total, padding = int(rows.sum()), (0, 3, 1)[turn % 3]
    logits = torch.randn(total + padding, vocab, generator=generator)
    if turn & 1:
        logits = torch.round(logits)
    logits = logits.to(TYPES[turn % 3])
    if turn % 5 == 2:
        odd = torch.randint(0, 4, logits.shape, generator=generator)
        logits[odd == 0] = torch.nan
        logits[:1] = -torch.inf
    best = torch.where(logits.isnan(), -torch.inf, logits.float()).argmax(-1)
    luck = torch.rand(len(best), generator=generator)
    other = torch.randint(0, vocab, best.shape, generator=generator)
    ids = torch.where(luck < 0.75, best.roll(1), other)
    logits[total:] = torch.inf
    if turn % 7 == 4:
        logits = torch.nn.functional.pad(logits, (0, 5))[:, :vocab]
    lens = torch.randint(1, 9000, (requests,), generator=generator)
    return Step(ids.to(device), rows.to(device), logits.to(device), lens.to(device), width)


def outputs(requests: int, width: int, device: str = "cpu") -> Emitted:
    """Allocate a launch's outputs, filled with values that it must overwrite."""

    def fill(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full(shape, -7, dtype=dtype, device=device)

    wide, narrow = torch.int64, torch.int32
    return Emitted(
        fill(wide, requests),
        fill(wide, requests),
        fill(narrow, requests),
        fill(narrow, requests),
        fill(wide, requests),
        fill(wide, requests, width),
    )
