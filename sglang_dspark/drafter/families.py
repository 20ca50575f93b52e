"""What of a drafter's config.json depends on the family of its layers: heads, rotary embedding and
what we do not compute, which is refused instead of being drafted wrongly.

Qwen3 is the format of SGLang's DSPARK. Gemma4 is DeepSpec's `Gemma4DSparkModel`, whose config is
the target's text config: full-attention layers with the target's global heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dspark.errors import DSparkError

_FULL = "full_attention"


def is_gemma4(raw: Mapping[str, Any]) -> bool:
    """Whether config.json describes Gemma4 layers."""
    return any(name.startswith("Gemma4") for name in raw.get("architectures") or [])


def shape_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Heads, rotary embedding and family, as fields of `DrafterConfig`.

    KeyError names a missing field; DSparkError says what of the config we do not compute.
    """
    refused = {
        "attention_bias": bool(raw.get("attention_bias")),
        "layer_types": any(kind != _FULL for kind in raw.get("layer_types") or []),
        "enable_moe_block": bool(raw.get("enable_moe_block")),
        "hidden_size_per_layer_input": is_gemma4(raw)
        and bool(raw.get("hidden_size_per_layer_input")),
    }
    for name, wrong in refused.items():
        if wrong:
            raise DSparkError(
                f"drafter config: {name} {raw[name]} is not supported; dense full-attention layers "
                "without biases are"
            )
    return _gemma4(raw) if is_gemma4(raw) else _qwen3(raw)


def _qwen3(raw: Mapping[str, Any]) -> dict[str, Any]:
    heads = raw["num_attention_heads"]
    rotary = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    _check_rotary(rotary, ("default",))
    _check_activation(raw.get("hidden_act", "silu"), "silu")
    return {
        "num_kv_heads": raw.get("num_key_value_heads", heads),
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "rope_theta": raw.get("rope_theta") or rotary.get("rope_theta", 10000.0),
    }


def _gemma4(raw: Mapping[str, Any]) -> dict[str, Any]:
    rotary = raw["rope_parameters"][_FULL]
    _check_rotary(rotary, ("default", "proportional"))
    _check_activation(raw.get("hidden_activation", "gelu_pytorch_tanh"), "gelu_pytorch_tanh")
    shared = bool(raw.get("attention_k_eq_v"))
    partial = rotary.get("rope_type") == "proportional"
    return {
        "family": "gemma4",
        "num_kv_heads": raw["num_global_key_value_heads" if shared else "num_key_value_heads"],
        "head_dim": raw["global_head_dim"],
        "keys_are_values": shared,
        "rope_theta": rotary["rope_theta"],
        "rotary_share": rotary.get("partial_rotary_factor", 1.0) if partial else 1.0,
        "logit_softcap": raw.get("final_logit_softcapping"),
    }


def _check_rotary(rotary: Mapping[str, Any], known: tuple[str, ...]) -> None:
    kind = rotary.get("rope_type") or rotary.get("type") or "default"
    if kind not in known or rotary.get("factor", 1.0) != 1.0:
        raise DSparkError(
            f"drafter config: rotary embedding {dict(rotary)} is not supported; {known} without a "
            "factor are"
        )


def _check_activation(found: str, known: str) -> None:
    if found != known:
        raise DSparkError(f"drafter config: activation {found!r} is not supported; {known} is")
