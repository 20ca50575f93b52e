"""Anchors and blocks: a step takes a few sequences and a fixed number of anchors in each; blocks
share their sequence's context and see nothing of each other (paper, 5.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.training.store import Response, StoreReader, subset


@dataclass(frozen=True)
class Batch:
    """S sequences with A anchors each.

    features [S, T, m*d]; anchors, positions [S, A]; labels, inputs [S, A, gamma]: token at p+k and
    at p+k-1; hidden [S, A, gamma, d] and log_partition [S, A, gamma] of the target at p+k-1; valid
    [S, A, gamma] is False past the end of the sequence.
    """

    features: Tensor
    anchors: Tensor
    positions: Tensor
    inputs: Tensor
    labels: Tensor
    hidden: Tensor
    log_partition: Tensor
    valid: Tensor


def anchor_positions(n: int, prompt_len: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` anchors in the answer, without replacement while there are enough: [count]."""
    choices = max(n - 1 - prompt_len, 1)
    picked = torch.randperm(choices, generator=generator)[:count]
    if len(picked) < count:
        extra = torch.randint(choices, (count - len(picked),), generator=generator)
        picked = torch.cat([picked, extra])
    return picked + min(prompt_len, n - 2)


def make_batch(
    responses: list[Response], anchors: int, gamma: int, generator: torch.Generator
) -> Batch:
    """Gather everything a step needs; context is padded on the right."""
    longest = max(len(r.tokens) for r in responses)
    features = torch.zeros(
        len(responses), longest, responses[0].features.shape[1], dtype=responses[0].features.dtype
    )
    rows: dict[str, list[Tensor]] = {
        k: [] for k in ("positions", "inputs", "labels", "hidden", "log_partition", "valid")
    }
    steps = torch.arange(gamma)
    for s, r in enumerate(responses):
        n = len(r.tokens)
        features[s, :n] = r.features
        p = anchor_positions(n, r.prompt_len, anchors, generator)
        at = p[:, None] + steps  # position of the input token x_{k-1}
        inside = at < n - 1
        at = at.clamp(max=n - 2)
        rows["positions"].append(p)
        rows["inputs"].append(r.tokens[at])
        rows["labels"].append(r.tokens[at + 1])
        rows["hidden"].append(r.hidden[at])
        rows["log_partition"].append(r.log_partition[at])
        rows["valid"].append(inside)
    stacked = {k: torch.stack(v) for k, v in rows.items()}
    return Batch(features=features, anchors=stacked["inputs"][..., 0], **stacked)


class Sampler:
    """Endless shuffled passes over the training sequences; its state is small and restorable.

    Each pass looks at the store anew, so training can start while responses are still being made.
    """

    def __init__(self, reader: StoreReader, held_out_every: int, seed: int):
        self.reader, self.held_out_every = reader, held_out_every
        self.generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []

    def responses(self, count: int) -> Iterator[Response]:
        """The next `count` sequences that have at least one position to learn from."""
        given = 0
        while given < count:
            if not self._order:
                self.reader.refresh()
                kept, _ = subset(self.reader.rows, self.held_out_every)
                order = torch.randperm(len(kept), generator=self.generator)
                self._order = [kept[i] for i in order.tolist()]
            response = self.reader[self._order.pop()]
            if len(response.tokens) - response.prompt_len >= 3:
                given += 1
                yield response

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue with the same sequences and anchors."""
        return {
            "order": torch.tensor(self._order, dtype=torch.long),
            "generator": self.generator.get_state(),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from `state`."""
        self._order = state["order"].tolist()
        self.generator.set_state(state["generator"])
