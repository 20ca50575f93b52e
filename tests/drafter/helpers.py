"""Small drafters of every kind, with random weights."""

import torch

from sglang_dspark.drafter import DrafterConfig, DSparkDrafter


def tiny_config(**changes: object) -> DrafterConfig:
    fields: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "gamma": 4,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "mask_token_id": 3,
        "markov_rank": 8,
    }
    return DrafterConfig(**{**fields, **changes})  # type: ignore[arg-type]


def tiny_drafter(seed: int = 0, **changes: object) -> DSparkDrafter:
    torch.manual_seed(seed)
    drafter = DSparkDrafter(tiny_config(**changes))
    c = drafter.config
    drafter.attach(
        torch.randn(c.vocab_size, c.hidden_size), torch.randn(c.vocab_size, c.hidden_size)
    )
    return drafter.eval()
