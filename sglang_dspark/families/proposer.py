"""Define the protocols between the reference engine and a drafter of any family.

A proposer starts a state for the slots of a run. The engine passes the target's outputs to the
state (`prefill`, `commit`) and gets drafts from it (`propose`). Only the state decides what to keep
of a sequence; only the engine accepts drafts.
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
        """Store a new prompt, tokens [R, P] at positions 0.., in slots `rows` [R]."""

    def propose(
        self,
        rows: Tensor | None,
        anchor: Tensor,
        lens: Tensor,
        temperature: Tensor | None,
        generator: torch.Generator,
    ) -> DraftBlock:
        """Draft gamma tokens after anchor [R], at position lens [R]; rows None: all slots.

        temperature [R], None: all greedy. `DraftBlock.probs` must be the exact distributions that
        drafts are drawn from.
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
        """Store the verify window, tokens [R, 1 + gamma] at positions from lens [R] on.

        The first accepted [R] of its drafts stay.
        """

    def open(self, rows: Tensor, anchor: Tensor, lens: Tensor) -> OpenBlock:
        """Start a block after anchor [R] at positions lens [R] whose drafts the caller chooses.

        Its logits are those that `propose` would draw from. Replaying a sampled answer needs them
        one position at a time, as each draft follows the answer's own token.
        """


class Proposer(Protocol):
    """A drafter made ready for a block size.

    gamma: drafts a step. target_layer_ids: layers whose features it reads; empty: none.
    """

    gamma: int
    target_layer_ids: tuple[int, ...]

    def start(self, slots: int, max_len: int) -> DraftState:
        """Return an empty state for requests of at most `max_len` tokens."""


class OpenBlock(Protocol):
    """The block of R requests that is being drafted.

    draft_ids: [V'] token of each column of the logits, None if columns are token ids.
    """

    draft_ids: Tensor | None

    def logits(self, previous: Tensor) -> Tensor:
        """Return logits [R, V'] of the next position; call once per position.

        previous [R]: the token chosen before it, first the anchor.
        """

    def confidence(self) -> Tensor:
        """Return c_k of the positions drafted so far, [R, k]; [R, 0] without a confidence head."""
