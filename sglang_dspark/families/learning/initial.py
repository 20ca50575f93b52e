"""Start a drafter from the target.

Draft layers start from its last layers, the projection from its last captured features.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_dspark.drafter.backbone import Backbone, DraftLayer
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.moe import MoE
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.learning.upcycling import split_mlp
from sglang_dspark.families.shape import BaseShape

_SWIGLU = ("gate", "up", "down")
_OF_A_LAYER = re.compile(r"model\.layers\.\d+\.(.+)")
_COPIED = {
    *(f"{norm}_layernorm.weight" for norm in ("input", "post_attention")),
    *(f"self_attn.{kind}_proj.weight" for kind in "qkvo"),
    *(f"mlp.{kind}_proj.weight" for kind in _SWIGLU),
}
_OPTIONAL = {  # Qwen3's norms of heads are copied, Qwen2's biases are not
    *(f"self_attn.{kind}_norm.weight" for kind in "qk"),
    *(f"self_attn.{kind}_proj.bias" for kind in "qkv"),
    "self_attn.rotary_emb.inv_freq",
}


def backbone_fields(shape: BaseShape, mask_token_id: int, target: Any) -> dict[str, Any]:
    """Return `DrafterConfig`'s fields of a backbone, with widths and heads of the target's config.

    Raises DSparkError if the target has fewer layers than the drafter is to copy.
    """
    started = getattr(shape, "start_from", None) is not None
    if shape.init_from_target and not started and shape.layers > target.num_hidden_layers:
        raise DSparkError(
            f"drafter.layers {shape.layers} is more than the target's {target.num_hidden_layers}, "
            "which they begin as: lower it, or set drafter.init_from_target: false"
        )
    rope = getattr(target, "rope_parameters", None) or {}
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_layers": shape.layers,
        "num_heads": target.num_attention_heads,
        "num_kv_heads": target.num_key_value_heads,
        "head_dim": getattr(target, "head_dim", None)
        or target.hidden_size // target.num_attention_heads,
        "vocab_size": target.vocab_size,
        "gamma": shape.gamma,
        "target_layer_ids": shape.target_layer_ids,
        "num_target_layers": target.num_hidden_layers,
        "mask_token_id": mask_token_id,
        "rms_norm_eps": 1e-6,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "max_position_embeddings": target.max_position_embeddings,
    }


def target_weights(target_dir: Path) -> dict[str, Tensor]:
    """Load all tensors of the target's checkpoint, by name.

    Raises DSparkError if its layers are not of Llama's form.
    """
    weights: dict[str, Tensor] = {}
    for file in sorted(target_dir.glob("*.safetensors")):
        weights.update(load_file(str(file)))
    found = {match[1] for name in weights if (match := _OF_A_LAYER.fullmatch(name))}
    if other := sorted(found - _COPIED - _OPTIONAL) or sorted(_COPIED - found):
        raise DSparkError(
            f"drafts cannot begin as the layers of {target_dir}, which are not of Llama's form "
            f"({other[0]}): set drafter.init_from_target: false"
        )
    return weights


@torch.no_grad()
def start_backbone(backbone: Backbone, c: DrafterConfig, weights: dict[str, Tensor]) -> None:
    """Copy the target's last layers and norms; the last captured features pass through."""
    first = c.num_target_layers - c.num_layers
    for i, layer in enumerate(backbone.layers):
        _copy_layer(layer, weights, f"model.layers.{first + i}.")
        if isinstance(layer.mlp, MoE):
            mlp = [weights[f"model.layers.{first + i}.mlp.{k}_proj.weight"] for k in _SWIGLU]
            split_mlp(layer.mlp, *mlp)
    backbone.norm.weight.copy_(weights["model.norm.weight"])
    last = f"model.layers.{c.num_target_layers - 1}.input_layernorm.weight"
    backbone.hidden_norm.weight.copy_(weights[last])
    start_projection(backbone.fc.weight, c.hidden_size)


@torch.no_grad()
def start_projection(weight: Tensor, hidden_size: int) -> None:
    """Fill the feature projection [d, m*d]: the last layer's features and a little noise."""
    weight.normal_(std=1e-3)
    weight[:, -hidden_size:] += torch.eye(hidden_size, device=weight.device)


def _copy_layer(layer: DraftLayer, weights: dict[str, Tensor], prefix: str) -> None:
    """Copy one target layer; head norms, which Llama lacks, start at the scale of its heads."""
    own = dict(layer.named_parameters())
    for name, parameter in own.items():
        source = weights.get(prefix + name)
        if source is not None and source.shape == parameter.shape:
            parameter.copy_(source)
    gain = weights[prefix + "input_layernorm.weight"]
    for kind in ("q", "k"):
        if prefix + f"self_attn.{kind}_norm.weight" not in weights:
            projection = weights[prefix + f"self_attn.{kind}_proj.weight"] * gain
            scale = projection.pow(2).sum(-1).mean().sqrt()
            own[f"self_attn.{kind}_norm.weight"].fill_(float(scale))
