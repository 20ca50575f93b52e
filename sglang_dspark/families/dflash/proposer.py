"""Proposer of DFlash: keep the context's keys and values, draft a block in one pass."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from sglang_dspark.drafter.context import FeatureState, shorter_block
from sglang_dspark.drafter.model import DraftBlock
from sglang_dspark.families.dflash.model import DFlashConfig, DFlashDrafter


class DFlashState(FeatureState):
    """Context of the requests in flight; see `evaluation.proposer`."""

    def __init__(self, proposer: DFlashProposer, slots: int, max_len: int):
        self.drafter = drafter = proposer.drafter
        super().__init__(drafter.backbone, drafter.config.shape, slots, max_len)

    def propose(
        self,
        rows: Tensor | None,
        anchor: Tensor,
        lens: Tensor,
        temperature: Tensor | None,
        generator: torch.Generator,
    ) -> DraftBlock:
        """Draft after anchor [R] at positions lens [R]."""
        context = self.context.read(rows, int(lens.max()))
        at = lens[:, None]
        h = self.drafter.forward_blocks(anchor[:, None], at, context, at)[:, 0]
        return self.drafter.draft(h, temperature, generator)

    def open(self, rows: Tensor, anchor: Tensor, lens: Tensor) -> DFlashBlock:
        """See `DraftState.open`."""
        return DFlashBlock(self, rows, anchor, lens)


class DFlashProposer:
    """DFlash for the reference engine; gamma at most the trained one, with a shorter window."""

    def __init__(self, drafter: DFlashDrafter, gamma: int | None = None):
        self.drafter = drafter
        if gamma is not None:
            self.drafter = copy.copy(drafter)  # with a shorter window, sharing its weights
            self.drafter.config = DFlashConfig(shorter_block(drafter.config.shape, gamma))
        self.gamma = self.drafter.config.gamma
        self.target_layer_ids = drafter.config.target_layer_ids

    def start(self, slots: int, max_len: int) -> DFlashState:
        """Return empty context for a run."""
        return DFlashState(self, slots, max_len)


class DFlashBlock:
    """A block from one pass of the backbone; no position reads the drafts before it."""

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
