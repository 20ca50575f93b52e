"""DFlash: DSpark's parallel backbone without a sequential head (paper, 3.1 and 5, the baseline).

Every position is drafted from the anchor and the context, but not from the drafts before it.

Block layout and names are those of SGLang's DFLASH (sglang/srt/models/dflash.py,
srt/speculative/dflash_worker_v2.py): a window of `block_size` tokens [anchor, mask, ...]. Row j >=
1 of it gives the token at its own position, so there are block_size - 1 drafts. DSpark's rows are
shifted by one: its row j gives the token after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.common.files import brief
from sglang_dspark.drafter.attention import ContextKV, PackedLayout
from sglang_dspark.drafter.backbone import Backbone
from sglang_dspark.drafter.config import DFLASH_ARCHITECTURE, DrafterConfig, read_config
from sglang_dspark.drafter.draft_probs import choose, over_vocabulary
from sglang_dspark.drafter.fields import Fields, reading_config
from sglang_dspark.drafter.model import DraftBlock
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.vocabulary import check_draft_ids

ARCHITECTURE = DFLASH_ARCHITECTURE


@dataclass(frozen=True)
class DFlashConfig:
    """Config of the backbone, `shape`; its gamma counts drafts, and the window is one longer.

    Of `shape`, the fields of the sequential and the confidence head are not used.
    """

    shape: DrafterConfig

    @property
    def gamma(self) -> int:
        """Return the drafts per step."""
        return self.shape.gamma

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Return the target layers whose outputs are the context features."""
        return self.shape.target_layer_ids

    @classmethod
    def from_dir(cls, path: Path) -> DFlashConfig:
        """Read `config.json`. Raises DSparkError that names a missing field."""
        raw = read_config(path)
        with reading_config(path, "DFlash"):
            return cls(DrafterConfig.from_json(_headless(raw, path), path))

    def to_json(self) -> dict[str, Any]:
        """Return the `config.json` that this class and stock SGLang both read."""
        raw = self.shape.to_json()
        heads = ("markov_rank", "markov_head_type", "enable_confidence_head")
        for name in (*heads, "confidence_head_with_markov"):
            raw.pop(name)
        return {**raw, "architectures": [ARCHITECTURE], "block_size": self.gamma + 1}


def _headless(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the config of the DSpark drafter that has the same backbone."""
    fields = Fields(raw, path).merged()
    size = fields.get("block_size")
    if not isinstance(size, int) or size < 2:
        raise DSparkError(
            f"{path}/config.json: block_size must be at least 2 (anchor and one draft), found "
            f"{brief(size, 40)}; is this a DFlash drafter?"
        )
    return fields | {"block_size": size - 1, "markov_rank": 1, "markov_head_type": "vanilla"}


class DFlashDrafter(nn.Module):
    """Backbone around the target's embedding and LM head."""

    embed_weight: Tensor
    head_weight: Tensor
    draft_ids: Tensor | None

    def __init__(self, config: DFlashConfig, draft_ids: Tensor | None = None):
        """Make the backbone. draft_ids [V'] ascending: tokens that are drafted; None: all."""
        super().__init__()
        check_draft_ids(draft_ids, config.shape.vocab_size)
        self.config = config
        self.backbone = Backbone(config.shape)
        empty = torch.empty(0, config.shape.hidden_size)
        self.register_buffer("embed_weight", empty, persistent=False)
        self.register_buffer("head_weight", empty, persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def attach(self, embed_tokens: Tensor, lm_head: Tensor) -> None:
        """Share the target's embedding and LM head, both [V, d]; neither is trained or saved."""
        self.embed_weight, full = embed_tokens.detach(), lm_head.detach()
        self.head_weight = full if self.draft_ids is None else full[self.draft_ids]

    def window(self, anchors: Tensor) -> Tensor:
        """Embed anchor ids [...] as [anchor, mask x gamma], [..., gamma + 1, d]."""
        ids = anchors.new_full((*anchors.shape, self.config.gamma + 1), self.mask_token_id)
        ids[..., 0] = anchors
        return self.embed_weight[ids]

    @property
    def mask_token_id(self) -> int:
        """Return the token whose embedding is the input of a drafted position."""
        return self.config.shape.mask_token_id

    def context_kv(self, features: Tensor, positions: Tensor) -> list[ContextKV]:
        """Map target features [..., m*d] at positions [...] to k, v [..., Hkv, D] per layer."""
        return self.backbone.context_kv(features, positions)

    def forward_blocks(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: Sequence[ContextKV],
        visible: Tensor | PackedLayout,
    ) -> Tensor:
        """Run A blocks in each of S sequences, or P packed blocks.

        Returns h [..., gamma, d] of the drafted rows. Arguments as in
        `DSparkDrafter.forward_blocks`.
        """
        return self.backbone(self.window(anchors), positions, context, visible)[..., 1:, :]

    def logits(self, h: Tensor) -> Tensor:
        """Map h [..., d] to logits [..., V'] over the draft vocabulary."""
        return nn.functional.linear(h, self.head_weight)

    def draft(
        self,
        h: Tensor,
        temperature: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> DraftBlock:
        """Draft all positions at once: h [R, gamma, d] -> x_k ~ softmax(h_k W / T); no confidence.

        temperature [R] (0: that row is greedy), None: all greedy.
        """
        rows, gamma, _ = h.shape
        temperature = None if temperature is None else temperature.repeat_interleave(gamma)
        columns, distribution = choose(self.logits(h).flatten(0, 1), temperature, generator)
        tokens = columns if self.draft_ids is None else self.draft_ids[columns]
        probs = None
        if distribution is not None:
            distribution = over_vocabulary(
                distribution, self.draft_ids, self.config.shape.vocab_size
            )
            probs = distribution.view(rows, gamma, -1)
        nothing = h.new_empty(rows, 0)
        return DraftBlock(tokens.view(rows, gamma), probs, nothing, nothing)
