"""Eagle3 with one layer: embedded token and fused target features in, logits over a reduced
vocabulary out; its own pre-norm output stands for the features from the second step on.

Format and names are those of SGLang's EAGLE3 (sglang/srt/models/llama_eagle3.py). The head
over the draft vocabulary is the drafter's own and is trained, as in Eagle3.
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
from sglang_dspark.baselines.vocabulary import stored_draft_ids, to_d2t, to_t2d
from sglang_dspark.drafter.attention import RMSNorm
from sglang_dspark.drafter.checkpoint import built, write_checkpoint
from sglang_dspark.drafter.config import read_config
from sglang_dspark.drafter.fields import reading_config
from sglang_dspark.drafter.target_fit import require_sizes, target_with
from sglang_dspark.drafter.weight_files import bare_name, stored_tensors
from sglang_dspark.errors import DSparkError

ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYER = ("self_attn.", "mlp.", "input_layernorm.", "hidden_norm.", "post_attention_layernorm.")


@dataclass(frozen=True)
class Eagle3Config(ChainConfig):
    """`target_layer_ids`: target layers whose outputs, concatenated, are the features."""

    target_layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target_layer_ids or min(self.target_layer_ids) < 0:
            raise DSparkError(f"drafter config: target_layer_ids {list(self.target_layer_ids)}")

    @classmethod
    def from_dir(cls, path: Path) -> Eagle3Config:
        """Read `config.json`; DSparkError says what is missing."""
        raw = read_config(path)
        with reading_config(path, "Eagle3"):
            require_one_layer(raw, "Eagle3")
            layers = tuple(raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
            return cls(**chain_fields(raw), target_layer_ids=layers)

    def to_json(self) -> dict[str, Any]:
        """The `config.json` that this class and stock SGLang both read."""
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
        """draft_ids [V'] ascending: tokens that are drafted; None: all."""
        d, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, 2 * d, draft_ids)
        self.target_layer_ids = config.target_layer_ids
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.input_layernorm = RMSNorm(d, eps)
        self.hidden_norm = RMSNorm(d, eps)
        self.norm = RMSNorm(d, eps)
        self.lm_head = nn.Linear(d, config.draft_vocab_size, bias=False)

    def attach(self, embed_tokens: Tensor, lm_head: Tensor) -> None:
        """Share the target's embedding [V, d]; the drafter has a head of its own."""
        self.embed_weight = embed_tokens.detach()

    def start_head(self, lm_head: Tensor) -> None:
        """Copy the draft tokens' rows of the target's LM head [V, d], where training starts."""
        rows = lm_head if self.draft_ids is None else lm_head[self.draft_ids]
        with torch.no_grad():
            self.lm_head.weight.copy_(rows)

    def fuse(self, states: Tensor) -> Tensor:
        """Features [..., m*d] -> [..., d]."""
        return self.fc(states)

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `ChainDrafter.enter`."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        return hidden, x

    def logits(self, out: Tensor) -> Tensor:
        """out [..., d] -> [..., V']."""
        return self.lm_head(self.norm(out))


def _stored(name: str) -> str:
    """Name in the file: the layer's modules stand below `midlayer`."""
    return f"midlayer.{name}" if name.startswith(_LAYER) else name


def save_eagle3(drafter: Eagle3Drafter, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write what SGLang serves as EAGLE3."""
    tensors = {_stored(k): v.to(dtype) for k, v in drafter.state_dict().items()}
    if drafter.draft_ids is not None:
        tensors["d2t"] = to_d2t(drafter.draft_ids)
        tensors["t2d"] = to_t2d(drafter.draft_ids, drafter.config.vocab_size)
    write_checkpoint(path, tensors, drafter.config.to_json())


def load_eagle3(path: Path, embed_tokens: Tensor, lm_head: Tensor) -> Eagle3Drafter:
    """Load in float32 and attach to the target's embedding and LM head [V, d].

    Raises DSparkError for a missing, damaged or foreign checkpoint and for another target.
    """
    config = Eagle3Config.from_dir(path)
    require_sizes(path, config.hidden_size, config.vocab_size, target_with(embed_tokens))
    stored = stored_tensors(path, lambda name: bare_name(name).replace("layers.0.", "midlayer."))
    ids = stored_draft_ids(stored, config.vocab_size, path, config.draft_vocab_size)
    drafter = built(lambda: Eagle3Drafter(config, ids), stored, _stored, path)
    drafter.attach(embed_tokens, lm_head)
    return drafter.eval()
