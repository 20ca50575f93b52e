"""Draw stored sequences in endless shuffled passes, with anchors for each; restorable."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.errors import DSparkError
from sglang_dspark.training.distributed import World
from sglang_dspark.training.packing import anchor_positions
from sglang_dspark.training.store import StoreReader, subset

_LEAST_ANSWER = 3  # tokens: an anchor, a drafted token and one after it


@dataclass(frozen=True)
class Draw:
    """A sequence of the store and anchors [A] in it."""

    index: int
    anchors: Tensor


def usable(reader: StoreReader, index: int) -> bool:
    """Return whether an answer of the sequence is long enough to learn from."""
    return any(b - a >= _LEAST_ANSWER for a, b in reader.answers(index))


class Sampler:
    """Draws that are equal in all processes with the same seed.

    Each pass reads the store's index again, so training can start while responses are still made.
    """

    def __init__(
        self, reader: StoreReader, held_out_every: int, seed: int, world: World | None = None
    ):
        self.reader, self.held_out_every = reader, held_out_every
        self.world = world or World()
        self.generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []

    def draw(self, sequences: int, anchors: int) -> list[Draw]:
        """Draw the next `sequences` that are usable, with `anchors` anchors in each."""
        found: list[int] = []
        barren = 0
        while len(found) < sequences:
            if not self._order:
                self._begin_pass()
            index = self._order.pop()
            if usable(self.reader, index):
                found.append(index)
                barren = 0
            elif (barren := barren + 1) >= 2 * len(self.reader):
                # The end of one pass and the start of the next may both have short answers only.
                raise DSparkError(
                    f"{self.reader.path}: no answer has {_LEAST_ANSWER} tokens to learn from; "
                    "raise data.max_new_tokens and run `dspark train data` into another store"
                )
        return [
            Draw(i, anchor_positions(self.reader.answers(i), anchors, self.generator))
            for i in found
        ]

    def _begin_pass(self) -> None:
        self.reader.refresh()
        rows = self.reader.rows[: self.world.least(len(self.reader))]
        kept, _ = subset(rows, self.held_out_every)
        order = torch.randperm(len(kept), generator=self.generator)
        self._order = [kept[i] for i in order.tolist()]

    def state(self) -> dict[str, Tensor]:
        """Return the state that continues with the same sequences and anchors."""
        return {
            "order": torch.tensor(self._order, dtype=torch.long),
            "generator": self.generator.get_state(),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from `state`."""
        self._order = state["order"].tolist()
        self.generator.set_state(state["generator"])
