"""MTP: one layer that reads the embedded token and the target's last hidden state, chained for 1, 3
or 5 steps with the same weights.

Format and names are those that SGLang serves as EAGLE for a Llama target
(sglang/srt/models/llama_eagle.py): a projection with bias of [embedding; hidden], a layer without
input norm, no final norm, so that the layer's output is an estimate of the target's last hidden
state (after its final norm), which the target's LM head reads and the next step takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.baselines.chain import (
    ChainConfig,
    ChainDrafter,
    chain_fields,
    require_one_layer,
)
from sglang_dspark.baselines.vocabulary import stored_draft_ids, to_d2t
from sglang_dspark.common.writing import replacing
from sglang_dspark.drafter.checkpoint import built, write_checkpoint
from sglang_dspark.drafter.config import read_config
from sglang_dspark.drafter.fields import reading_config
from sglang_dspark.drafter.target_fit import require_sizes, target_with
from sglang_dspark.drafter.weight_files import stored_tensors

ARCHITECTURE = "LlamaForCausalLMEagle"
TOKEN_MAP = "token_map.pt"


@dataclass(frozen=True)
class MTPConfig(ChainConfig):
    """As `ChainConfig`."""

    @classmethod
    def from_dir(cls, path: Path) -> MTPConfig:
        """Read `config.json`; DSparkError says what is missing."""
        raw = read_config(path)
        with reading_config(path, "MTP"):
            require_one_layer(raw, "MTP")
            return cls(**chain_fields(raw))

    def to_json(self) -> dict[str, Any]:
        """The `config.json` that this class and stock SGLang both read."""
        return {"architectures": [ARCHITECTURE], **super().to_json()}


class MTPDrafter(ChainDrafter):
    """fc([embedding; hidden]) -> layer -> the target's LM head."""

    head_weight: Tensor
    config: MTPConfig
    reads_features = False
    target_layer_ids = ()

    def __init__(self, config: MTPConfig, draft_ids: Tensor | None = None):
        """draft_ids [V'] ascending: tokens that are drafted; None: all."""
        super().__init__(config, config.hidden_size, draft_ids)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.register_buffer("head_weight", torch.empty(0, config.hidden_size), persistent=False)

    def attach(self, embed_tokens: Tensor, lm_head: Tensor) -> None:
        """Share the target's embedding and LM head, both [V, d]; neither is trained or saved."""
        self.embed_weight, full = embed_tokens.detach(), lm_head.detach()
        self.head_weight = full if self.draft_ids is None else full[self.draft_ids]

    def fuse(self, states: Tensor) -> Tensor:
        """The target's last hidden state [..., d], as it is."""
        return states

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `ChainDrafter.enter`."""
        x = self.fc(torch.cat([embedded, hidden], -1)).float()  # the residual stream
        return x, x

    def logits(self, out: Tensor) -> Tensor:
        """out [..., d] -> [..., V']."""
        return nn.functional.linear(out, self.head_weight)


def _stored(name: str) -> str:
    """Name in the file: the layer's modules stand below `layers.0`."""
    return name if name.startswith("fc.") else f"layers.0.{name}"


def save_mtp(drafter: MTPDrafter, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write what SGLang serves as EAGLE.

    With a reduced draft vocabulary, `token_map.pt` beside it is for `--speculative-token-map`
    (SGLang reads no other format there); without that option SGLang drafts over all tokens.
    """
    tensors = {_stored(k): v.to(dtype) for k, v in drafter.state_dict().items()}
    if drafter.draft_ids is not None:
        tensors["d2t"] = to_d2t(drafter.draft_ids)
    write_checkpoint(path, tensors, drafter.config.to_json())
    if drafter.draft_ids is not None:
        with replacing(Path(path) / TOKEN_MAP, alone=True) as temporary:
            torch.save(drafter.draft_ids.tolist(), temporary)


def load_mtp(path: Path, embed_tokens: Tensor, lm_head: Tensor) -> MTPDrafter:
    """Load in float32 and attach to the target's embedding and LM head [V, d].

    Raises DSparkError for a missing, damaged or foreign checkpoint and for another target.
    """
    config = MTPConfig.from_dir(path)
    require_sizes(path, config.hidden_size, config.vocab_size, target_with(embed_tokens))
    stored = stored_tensors(path)
    ids = stored_draft_ids(stored, config.vocab_size, path, config.draft_vocab_size)
    drafter = built(lambda: MTPDrafter(config, ids), stored, _stored, path)
    drafter.attach(embed_tokens, lm_head)
    return drafter.eval()
