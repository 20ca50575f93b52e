"""Small drafters of every kind, with random weights, for a target of three layers."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.drafter import DrafterConfig
from sglang_dspark.families.chain.model import ChainDrafter
from sglang_dspark.families.dflash.model import DFlashConfig, DFlashDrafter
from sglang_dspark.families.eagle3.model import Eagle3Config, Eagle3Drafter
from sglang_dspark.families.mtp.model import MTPConfig, MTPDrafter

KINDS = ("dflash", "eagle3", "mtp")
WIDTH, GAMMA = 64, 3
LAYERS = (0, 1)


def random_drafter(
    kind: str,
    vocab_size: int,
    draft_ids: Tensor | None = None,
    *,
    gamma: int = GAMMA,
    num_target_layers: int = 3,
    seed: int = 5,
) -> DFlashDrafter | ChainDrafter:
    """A drafter of width WIDTH that is not attached to a target yet."""
    torch.manual_seed(seed)
    common: dict[str, int] = {
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab_size,
        "gamma": gamma,
    }
    if kind == "dflash":
        shape = DrafterConfig(
            **common,
            num_layers=2,
            target_layer_ids=LAYERS,
            num_target_layers=num_target_layers,
            mask_token_id=3,
            markov_rank=1,
        )
        return DFlashDrafter(DFlashConfig(shape), draft_ids)
    columns = vocab_size if draft_ids is None else len(draft_ids)
    if kind == "eagle3":
        config = Eagle3Config(**common, draft_vocab_size=columns, target_layer_ids=LAYERS)
        return Eagle3Drafter(config, draft_ids)
    return MTPDrafter(MTPConfig(**common, draft_vocab_size=columns), draft_ids)
