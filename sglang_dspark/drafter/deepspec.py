"""Write drafters in the format of DeepSpec, the training repository of the paper.

All options are at the top level of config.json, and the weights include the target's embedding and
LM head. `load_drafter` reads such checkpoints like any other (embedding and head come from the
target). SGLang serves the Qwen3 ones as DSPARK; it has no Gemma4 draft model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sglang_dspark.drafter.checkpoint import own_tensors, write_checkpoint
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.errors import DSparkError

ANCHORS = 512  # anchors per sequence, which DeepSpec requires and uses in training only


def save_deepspec(drafter: DSparkDrafter, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a DeepSpec checkpoint of a drafter attached to its target.

    Raises DSparkError if only a reduced part of the target's LM head is attached, and for a drafter
    with experts, a window, residual streams or an anchor's row that drafts nothing, which DeepSpec
    does not have.
    """
    config = drafter.config
    if config.extended:
        raise DSparkError(
            "DeepSpec's format holds dense drafters with full attention and one residual stream "
            "only; this one is saved by `save_drafter`"
        )
    if not config.sample_from_anchor:
        raise DSparkError(
            "in DeepSpec's format the anchor's row drafts; this drafter (sample_from_anchor false) "
            "is saved by `save_drafter`"
        )
    if drafter.draft_ids is not None:
        raise DSparkError(
            "a drafter with a reduced vocabulary holds a part of the target's LM head only; load "
            "it without the reduction to export it for DeepSpec"
        )
    tensors = own_tensors(drafter, dtype)
    tensors["embed_tokens.weight"] = drafter.embed_weight.to(dtype).clone()
    tensors["lm_head.weight"] = drafter.head_weight.to(dtype).clone()
    write_checkpoint(path, tensors, deepspec_json(config))


def deepspec_json(config: DrafterConfig) -> dict[str, Any]:
    """Return DeepSpec's `config.json`."""
    options = {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "num_anchors": ANCHORS,
        "layer_types": ["full_attention"] * config.num_layers,
        "attention_dropout": 0.0,
    }
    plain = config.to_json()
    plain.pop("dflash_config")
    if config.family == "gemma4":
        plain |= _gemma4_json(config)
    elif config.rope_scaling is None:
        plain["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    return plain | options


def _gemma4_json(config: DrafterConfig) -> dict[str, Any]:
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rotary_share < 1:
        rotary |= {"rope_type": "proportional", "partial_rotary_factor": config.rotary_share}
    return {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_kv_heads,
        "attention_k_eq_v": config.keys_are_values,
        "rope_parameters": {"full_attention": rotary},
        "final_logit_softcapping": config.logit_softcap,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }
