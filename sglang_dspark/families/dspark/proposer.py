"""Proposer of DSpark: keep the context's keys and values, draft a block and its confidence."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.context import FeatureState, shorter_block
from sglang_dspark.drafter.model import DraftBlock, DSparkDrafter


class DSparkState(FeatureState):
    """Context of the requests in flight of a DSpark drafter."""

    def __init__(self, drafter: DSparkDrafter, slots: int, max_len: int):
        self.drafter = drafter
        super().__init__(drafter.backbone, drafter.config, slots, max_len)

    def propose(
        self,
        rows: Tensor | None,
        anchor: Tensor,
        lens: Tensor,
        temperature: Tensor | None,
        generator: torch.Generator,
    ) -> DraftBlock:
        """See `DraftState`."""
        context = self.context.read(rows, int(lens.max()))
        h = self.drafter.forward_block(anchor, lens, context, lens)  # [R, gamma, d]
        return self.drafter.draft(anchor, h, temperature, generator)

    def open(self, rows: Tensor, anchor: Tensor, lens: Tensor) -> DSparkBlock:
        """See `DraftState.open`."""
        return DSparkBlock(self, rows, anchor, lens)


class DSparkProposer:
    """A DSpark drafter with at most its trained block size."""

    def __init__(self, drafter: DSparkDrafter, gamma: int | None = None):
        self.drafter = drafter
        if gamma is not None:
            self.drafter = copy.copy(drafter)  # with a smaller block, sharing its weights
            self.drafter.config = shorter_block(drafter.config, gamma)
        self.gamma = self.drafter.config.gamma
        self.target_layer_ids = drafter.config.target_layer_ids

    def start(self, slots: int, max_len: int) -> DSparkState:
        """See `Proposer`."""
        return DSparkState(self.drafter, slots, max_len)


class DSparkBlock:
    """A block from one pass of the backbone, then the sequential head."""

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
