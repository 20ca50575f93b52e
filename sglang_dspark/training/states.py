"""Provide the target's states of a step: stored ones, or computed ones.

To compute them, the target runs over the stored tokens in the training step (no cache on disk;
paper, 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.training.packing import pack
from sglang_dspark.training.sampler import Draw
from sglang_dspark.training.store import Response, StoreReader

_ROWS = 64  # hidden states that go through the LM head at a time


class StateSource(Protocol):
    """A source of packed batches of drawn sequences."""

    def batch(self, draws: Sequence[Draw], gamma: int) -> PackedBatch:
        """Return the draws' contexts and blocks, with states."""
        ...


class StoredStates:
    """States that were stored when the answers were made."""

    def __init__(self, reader: StoreReader):
        self.reader = reader

    def batch(self, draws: Sequence[Draw], gamma: int) -> PackedBatch:
        """See StateSource."""
        responses = [self.reader[d.index] for d in draws]
        return pack(responses, [d.anchors for d in draws], gamma)


class ComputedStates:
    """States computed again, rounded as in the store."""

    def __init__(self, reader: StoreReader, target: TargetModel):
        self.reader, self.target = reader, target

    def batch(self, draws: Sequence[Draw], gamma: int) -> PackedBatch:
        """See StateSource."""
        responses = self._with_states([self.reader.bare(d.index) for d in draws], draws, gamma)
        return pack(responses, [d.anchors for d in draws], gamma)

    def _with_states(
        self, bare: Sequence[Response], draws: Sequence[Draw], gamma: int
    ) -> list[Response]:
        lengths = [len(r.tokens) for r in bare]
        tokens = torch.zeros(len(bare), max(lengths), dtype=torch.long)
        for row, r in enumerate(bare):
            tokens[row, : lengths[row]] = r.tokens
        device = self.target.device
        cache = self.target.new_cache(len(bare), max(lengths))
        start = torch.zeros(len(bare), dtype=torch.long, device=device)
        out = self.target.forward(tokens.to(device), start, cache)
        filled = []
        for row, (r, draw) in enumerate(zip(bare, draws, strict=True)):
            n = lengths[row]
            hidden = out.hidden[row, :n]
            needed = (draw.anchors[:, None] + torch.arange(gamma)).clamp(max=n - 1).unique()
            log_partition = torch.zeros(n)
            for at in needed.split(_ROWS):
                logits = self.target.logits(hidden[at.to(device)])
                log_partition[at] = logits.logsumexp(-1).cpu()
            filled.append(
                replace(
                    r,
                    features=out.features[row, :n].bfloat16().cpu(),
                    hidden=hidden.bfloat16().cpu(),
                    log_partition=log_partition,
                )
            )
        return filled
