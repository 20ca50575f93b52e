"""Eagle3 with one layer: embedded token and fused features in, reduced-vocabulary logits out.

From the second step on, the layer's own pre-norm output replaces the target's features.

Format and names are those of SGLang's EAGLE3 (sglang/srt/models/llama_eagle3.py). The head over the
draft vocabulary is the drafter's own and is trained, as in Eagle3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.attention import RMSNorm
from sglang_dspark.drafter.config import read_config
from sglang_dspark.drafter.fields import reading_config
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.chain.model import (
    ChainConfig,
    ChainDrafter,
    chain_fields,
    require_one_layer,
)
from sglang_dspark.families.chain.served import EAGLE3

ARCHITECTURE = EAGLE3


def named_layers(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the target layers whose outputs config.json names, or None."""
    layers = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return None if layers is None else tuple(layers)


def usual_layers(num_target_layers: int) -> tuple[int, ...]:
    """Return the default layers of a drafter: the inputs of SGLang's 2, n // 2 and n - 3.

    sglang/srt/models/llama.py, `set_eagle3_layers_to_capture`.
    """
    return 1, num_target_layers // 2 - 1, num_target_layers - 4


@dataclass(frozen=True)
class Eagle3Config(ChainConfig):
    """`target_layer_ids`: target layers whose outputs, concatenated, are the features."""

    target_layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target_layer_ids or min(self.target_layer_ids) < 0:
            raise DSparkError(f"drafter config: target_layer_ids {list(self.target_layer_ids)}")

    @classmethod
    def from_dir(cls, path: Path, num_target_layers: int | None = None) -> Eagle3Config:
        """Read `config.json`. Raises DSparkError that names a missing field.

        num_target_layers: gives the layers if config.json names none (`usual_layers`).
        """
        raw = read_config(path)
        with reading_config(path, "Eagle3"):
            layers = named_layers(raw)
            if layers is None and num_target_layers is not None:
                layers = usual_layers(num_target_layers)
            return cls.from_json(raw, layers)

    @classmethod
    def from_json(
        cls, raw: Mapping[str, Any], layers: tuple[int, ...] | None = None
    ) -> Eagle3Config:
        """Read the contents of `config.json`. Raises KeyError that names a missing field.

        layers: override those of config.json.
        """
        require_one_layer(raw, "Eagle3")
        if layers is None:
            layers = tuple(raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        return cls(**chain_fields(raw), target_layer_ids=layers)

    def to_json(self) -> dict[str, Any]:
        """Return the `config.json` that this class and stock SGLang both read."""
        return {
            "architectures": [ARCHITECTURE],
            **super().to_json(),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.target_layer_ids),
            },
        }


class Eagle3Drafter(ChainDrafter):
    """Attention over [norm(embedding); norm(hidden)], residual around the hidden state alone."""

    config: Eagle3Config
    reads_features = True

    def __init__(self, config: Eagle3Config, draft_ids: Tensor | None = None):
        """Make the layer. draft_ids [V'] ascending: tokens that are drafted; None: all."""
        d, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, 2 * d, draft_ids)
        self.target_layer_ids = config.target_layer_ids
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.input_layernorm = RMSNorm(d, eps)
        self.hidden_norm = RMSNorm(d, eps)
        self.norm = RMSNorm(d, eps)
        self.lm_head = nn.Linear(d, config.draft_vocab_size, bias=False)

    def attach(self, embed_tokens: Tensor, lm_head: Tensor) -> None:
        """Share the target's embedding [V, d]; the drafter has its own head."""
        self.embed_weight = embed_tokens.detach()

    def start_head(self, lm_head: Tensor) -> None:
        """Copy the draft tokens' rows of the target's LM head [V, d], the start of training."""
        rows = lm_head if self.draft_ids is None else lm_head[self.draft_ids]
        with torch.no_grad():
            self.lm_head.weight.copy_(rows)

    def fuse(self, states: Tensor) -> Tensor:
        """Project features [..., m*d] to [..., d]."""
        return self.fc(states)

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `ChainDrafter.enter`."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        return hidden, x

    def logits(self, out: Tensor) -> Tensor:
        """Map out [..., d] to logits [..., V']."""
        return self.lm_head(self.norm(out))
