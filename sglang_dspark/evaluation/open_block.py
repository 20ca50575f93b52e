"""A draft block drawn position by position, its tokens chosen by the caller.

`propose` draws a whole block. Who replays a sampled answer must choose each draft by what the
answer has there (`replay`), and asks here for one position's logits at a time, of any kind of
drafter: its own state, the laws that `propose` would draw from.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from sglang_dspark.baselines.chain import ChainState, attend_with
from sglang_dspark.baselines.dflash import DFlashState
from sglang_dspark.evaluation.proposer import DraftState, DSparkState


class OpenBlock(Protocol):
    """The block of R requests that is being drafted.

    draft_ids: [V'] token of each column of the logits, None where columns are token ids.
    """

    draft_ids: Tensor | None

    def logits(self, previous: Tensor) -> Tensor:
        """Logits [R, V'] of the next position; previous [R]: the token chosen before it, first the
        anchor. To be called once a position."""

    def confidence(self) -> Tensor:
        """c_k of the positions drafted so far, [R, k]; [R, 0] without a confidence head."""


def open_block(state: DraftState, rows: Tensor, anchor: Tensor, lens: Tensor) -> OpenBlock:
    """A block after anchor [R] at positions lens [R] of the slots `rows` [R]."""
    if isinstance(state, DSparkState):
        return _DSparkBlock(state, rows, anchor, lens)
    if isinstance(state, DFlashState):
        return _DFlashBlock(state, rows, anchor, lens)
    assert isinstance(state, ChainState)
    return _ChainBlock(state, rows, anchor, lens)


class _DSparkBlock:
    """One pass of the backbone, then the sequential head."""

    def __init__(self, state: DSparkState, rows: Tensor, anchor: Tensor, lens: Tensor):
        self.drafter = drafter = state.drafter
        self.draft_ids = drafter.draft_ids
        context = state.context.read(rows, int(lens.max()))
        self.h = drafter.forward_block(anchor, lens, context, lens)  # [R, gamma, d]
        self.base = drafter.base_logits(self.h)  # [R, gamma, V']
        weight = drafter.markov_head.markov_w2.weight
        self.transition = weight if self.draft_ids is None else weight[self.draft_ids]
        self.latent_state = drafter.markov_head.start(len(anchor))
        self.embedded: list[Tensor] = []

    def logits(self, previous: Tensor) -> Tensor:
        """See `OpenBlock`."""
        head, k = self.drafter.markov_head, len(self.embedded)
        self.embedded.append(head.embed(previous))
        latent, self.latent_state = head.latent(self.embedded[k], self.h[:, k], self.latent_state)
        return self.base[:, k] + nn.functional.linear(latent, self.transition)

    def confidence(self) -> Tensor:
        """See `OpenBlock`."""
        h = self.h[:, : len(self.embedded)]
        return torch.sigmoid(self.drafter.confidence(h, torch.stack(self.embedded, 1)))


class _DFlashBlock:
    """One pass of the backbone; no position knows the drafts before it."""

    def __init__(self, state: DFlashState, rows: Tensor, anchor: Tensor, lens: Tensor):
        drafter, self.rows = state.drafter, len(rows)
        self.draft_ids = drafter.draft_ids
        context, at = state.context.read(rows, int(lens.max())), lens[:, None]
        h = drafter.forward_blocks(anchor[:, None], at, context, at)[:, 0]  # [R, gamma, d]
        self.positions = iter(drafter.logits(h).unbind(1))

    def logits(self, previous: Tensor) -> Tensor:
        """See `OpenBlock`."""
        return next(self.positions)

    def confidence(self) -> Tensor:
        """See `OpenBlock`."""
        return torch.empty(self.rows, 0)


class _ChainBlock:
    """The layer once a position."""

    def __init__(self, state: ChainState, rows: Tensor, anchor: Tensor, lens: Tensor):
        self.drafter, self.rows = state.drafter, len(rows)
        self.draft_ids = self.drafter.draft_ids
        self.chosen: list[Tensor] = []
        length = int(lens.max()) - 1
        context = state.keys[rows, :length], state.values[rows, :length]
        self.steps = self.drafter.unroll(
            state.waiting[rows],
            lens - 1,
            lambda k: self.chosen[k - 1],
            attend_with(context, lens - 1),
        )

    def logits(self, previous: Tensor) -> Tensor:
        """See `OpenBlock`."""
        self.chosen.append(previous)
        return self.drafter.logits(next(self.steps))

    def confidence(self) -> Tensor:
        """See `OpenBlock`."""
        return torch.empty(self.rows, 0)
