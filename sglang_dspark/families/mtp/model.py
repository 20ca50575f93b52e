"""MTP: one layer that reads the embedded token and the target's last hidden state.

It is chained for 1, 3 or 5 steps with the same weights. Format and names are those that SGLang
serves as EAGLE for a Llama target (sglang/srt/models/llama_eagle.py): a projection with bias of
[embedding; hidden], a layer without input norm, no final norm. So the layer's output is an estimate
of the target's last hidden state (after its final norm). The target's LM head and the next step
read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.config import read_config
from sglang_dspark.drafter.fields import reading_config
from sglang_dspark.families.chain.model import (
    ChainConfig,
    ChainDrafter,
    chain_fields,
    require_one_layer,
)
from sglang_dspark.families.chain.served import MTP

ARCHITECTURE = MTP


@dataclass(frozen=True)
class MTPConfig(ChainConfig):
    """Shape of an MTP drafter, see `ChainConfig`."""

    @classmethod
    def from_dir(cls, path: Path) -> MTPConfig:
        """Read `config.json`. Raises DSparkError that names a missing field."""
        raw = read_config(path)
        with reading_config(path, "MTP"):
            return cls.from_json(raw)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> MTPConfig:
        """Read the contents of `config.json`. Raises KeyError that names a missing field."""
        require_one_layer(raw, "MTP")
        return cls(**chain_fields(raw))

    def to_json(self) -> dict[str, Any]:
        """Return the `config.json` that this class and stock SGLang both read."""
        return {"architectures": [ARCHITECTURE], **super().to_json()}


class MTPDrafter(ChainDrafter):
    """fc([embedding; hidden]) -> layer -> the target's LM head."""

    head_weight: Tensor
    config: MTPConfig
    reads_features = False
    target_layer_ids = ()

    def __init__(self, config: MTPConfig, draft_ids: Tensor | None = None):
        """Make the layer. draft_ids [V'] ascending: tokens that are drafted; None: all."""
        super().__init__(config, config.hidden_size, draft_ids)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.register_buffer("head_weight", torch.empty(0, config.hidden_size), persistent=False)

    def attach(self, embed_tokens: Tensor, lm_head: Tensor) -> None:
        """Share the target's embedding and LM head, both [V, d]; neither is trained or saved."""
        self.embed_weight, full = embed_tokens.detach(), lm_head.detach()
        ids = self.draft_ids
        self.head_weight = full if ids is None else self.ops.take_rows(full, ids)

    def fuse(self, states: Tensor) -> Tensor:
        """Return the target's last hidden state [..., d] unchanged."""
        return states

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `ChainDrafter.enter`."""
        x = self.fc(torch.cat([embedded, hidden], -1)).float()  # the residual stream
        return x, x

    def logits(self, out: Tensor) -> Tensor:
        """Map out [..., d] to logits [..., V']."""
        # A backend may attach an LM head with padding after the vocabulary.
        return self.ops.multiply(out, self.head_weight)[..., : self.config.draft_vocab_size]
