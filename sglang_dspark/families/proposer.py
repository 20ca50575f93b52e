"""Protocols between the reference engine and a drafter of any family.

A proposer starts a state for the slots of a run. The engine passes the target's outputs to the
state (`prefill`, `commit`) and asks it for drafts (`propose`). The state alone decides what it
keeps of a sequence; accepting drafts is the engine's part.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sglang_dspark.drafter.model import DraftBlock


class DraftState(Protocol):
    """A drafter's memory of the requests in flight, one slot each.

    features [R, q, m*d] and hidden [R, q, d] are the target's, of the tokens [R, q] it has read.
    """

    def prefill(self, rows: Tensor, tokens: Tensor, features: Tensor, hidden: Tensor) -> None:
        """A new prompt, tokens [R, P] at positions 0.., in slots `rows` [R]."""

    def propose(
        self,
        rows: Tensor | None,
        anchor: Tensor,
        lens: Tensor,
        temperature: Tensor | None,
        generator: torch.Generator,
    ) -> DraftBlock:
        """gamma drafts after anchor [R], at position lens [R]; None: all slots.

        temperature [R], None: all greedy. `DraftBlock.probs` must be the exact distributions drawn
        from.
        """

    def commit(
        self,
        rows: Tensor,
        lens: Tensor,
        tokens: Tensor,
        features: Tensor,
        hidden: Tensor,
        accepted: Tensor,
    ) -> None:
        """The verify window, tokens [R, 1 + gamma] at positions lens.., of whose drafts the first
        accepted [R] stay."""

    def open(self, rows: Tensor, anchor: Tensor, lens: Tensor) -> OpenBlock:
        """Start a block after anchor [R] at positions lens [R] whose drafts the caller chooses.

        Its logits are those that `propose` would draw from. Replaying a sampled answer needs them
        one position at a time: each draft follows from the answer's own token.
        """


class Proposer(Protocol):
    """A drafter made ready for a block size.

    gamma: drafts a step. target_layer_ids: layers whose features it reads; empty: none.
    """

    gamma: int
    target_layer_ids: tuple[int, ...]

    def start(self, slots: int, max_len: int) -> DraftState:
        """Empty state for requests of at most `max_len` tokens."""


class OpenBlock(Protocol):
    """The block of R requests that is being drafted.

    draft_ids: [V'] token of each column of the logits, None where columns are token ids.
    """

    draft_ids: Tensor | None

    def logits(self, previous: Tensor) -> Tensor:
        """Logits [R, V'] of the next position; previous [R]: the token chosen before it, first the
        anchor. Call it once per position."""

    def confidence(self) -> Tensor:
        """c_k of the positions drafted so far, [R, k]; [R, 0] without a confidence head."""
