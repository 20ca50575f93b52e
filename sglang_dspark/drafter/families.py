"""Read heads, rotary embedding and layer family of a drafter from its config.json.

Qwen3 is the format of SGLang's DSPARK. Gemma4 is DeepSpec's `Gemma4DSparkModel`, whose config is
the target's text config: full-attention layers with the target's global heads.

Fields that change the computation of SGLang (srt/models/dflash.py) but not of the reference engine
are rejected, so that acceptance is always measured on the drafter that a server runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dspark.common.files import brief, number
from sglang_dspark.drafter.fields import Fields
from sglang_dspark.drafter.rotary import SCALED, YARN, Scaling, read_scaling
from sglang_dspark.errors import DSparkError

FULL_ATTENTION = "full_attention"
MOST_THETA = 1e15
_USE = "use a drafter with dense full-attention layers, without biases and without scaled rotation"
# Field -> the values that do not change the computation. Absent and null ones never do.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (),
    "conv_kernel_size": (0,),
    "enable_moe_block": (False,),
    "is_causal": (False,),
    "is_neox_style": (True,),
    "partial_rotary_factor": (1,),
    "projector_type": (),
    "rope_is_neox_style": (True,),
    "selector_rank": (0,),
    "text_config": (),
    "use_gemma_norm": (False,),
    "use_sliding_window": (False,),
    # of a target that contains its drafter; SGLang reads them before the drafter's own
    "dspark_block_size": (),
    "dspark_markov_head_type": (),
    "dspark_markov_rank": (),
    "dspark_noise_token_id": (),
    "dspark_target_layer_ids": (),
}
_ROTARY_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "factor": (1,),
    "partial_rotary_factor": (1,),
    "rope_dim": (),
    "mrope_section": (),
    "mrope_interleaved": (False,),
}


# SGLang and Transformers read these fields of YaRN differently.
_YARN_NEUTRAL = (
    "attention_factor",
    "attn_factor",
    "extrapolation_factor",
    "mscale",
    "mscale_all_dim",
)


def is_gemma4(raw: Mapping[str, Any]) -> bool:
    """Return whether config.json describes Gemma4 layers."""
    return any(name.startswith("Gemma4") for name in raw.get("architectures") or [])


def shape_fields(raw: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Read heads, rotary embedding and family, as fields of `DrafterConfig`.

    fields: of `raw`. Raises KeyError that names a missing field, DSparkError that names an
    unsupported one.
    """
    return _gemma4(raw) if is_gemma4(raw) else _qwen3(raw, fields)


def refuse_unsupported(raw: Mapping[str, Any], fields: Fields) -> None:
    """Raise DSparkError for the first field that the reference engine does not compute."""
    neutral = dict(_NEUTRAL)
    if is_gemma4(raw):
        neutral["hidden_size_per_layer_input"] = (0,)
        del neutral["use_sliding_window"]  # of the target's text config; layer_types decides
    for name, allowed in neutral.items():
        if not _is_neutral(fields.get(name), allowed):
            raise _unsupported(name, fields.get(name))
    name, known = "hidden_act", "silu"
    if is_gemma4(raw):
        name, known = "hidden_activation", "gelu_pytorch_tanh"
    if fields.get(name, known) != known:
        raise _unsupported(name, fields.get(name), f"use a drafter with {known}")
    _require_full_attention(fields)


def _is_neutral(value: object, allowed: tuple[object, ...]) -> bool:
    return value is None or any(value == each for each in allowed)


def _unsupported(name: str, value: object, fix: str = _USE) -> DSparkError:
    return DSparkError(f"{name} {brief(repr(value), 60)} is not supported; {fix}")


def _require_full_attention(fields: Fields) -> None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or any(kind != FULL_ATTENTION for kind in kinds):
        raise _unsupported("layer_types", kinds)
    layers = fields.integer("num_hidden_layers")
    if len(kinds) != layers:
        raise DSparkError(
            f"layer_types names {len(kinds)} layers and num_hidden_layers is {layers}; correct one"
        )


def rope_theta(raw: Mapping[str, Any], known: tuple[str, ...] = ("default",)) -> float:
    """Read the base of a rotary embedding of the `known` types.

    It may be in `rope_theta`, in `rope_parameters` or `rope_scaling`, or in one of these for each
    layer type; the places that name it must agree. There is no default: SGLang and Transformers
    would use 10000, and a drafter trained with another base drafts badly.
    """
    values = {"rope_theta": raw.get("rope_theta")}
    for place in ("rope_parameters", "rope_scaling"):
        rotary = _rotary(raw, place)
        _require_plain(place, rotary, known)
        values[f"{place}.rope_theta"] = rotary.get("rope_theta")
    found = {place: value for place, value in values.items() if value is not None}
    if not found:
        raise DSparkError(
            "rope_theta is missing (of Speculators transformer_layer_config.rope_parameters."
            "rope_theta); write the value that the drafter was trained with"
        )
    (place, value), *others = found.items()
    for other, its in others:
        if its != value:
            raise DSparkError(
                f"{place} is {brief(repr(value), 40)} and {other} is {brief(repr(its), 40)}; "
                "remove the wrong one"
            )
    return _positive(place, value)


def has_rope_by_layer_type(raw: Mapping[str, Any]) -> bool:
    """Return whether a rotary embedding is written for each layer type.

    SGLang then finds no `rope_theta` (`get_rope_config`) and uses 10000.
    """
    return any(_is_by_layer_type(raw.get(place)) for place in ("rope_parameters", "rope_scaling"))


def _is_by_layer_type(rotary: object) -> bool:
    return isinstance(rotary, dict) and any(isinstance(each, dict) for each in rotary.values())


def _rotary(raw: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """Return the mapping of config.json that describes the rotary embedding of full attention."""
    rotary = raw.get(place)
    if rotary is None:
        return {}
    if _is_by_layer_type(rotary):
        rotary = rotary.get(FULL_ATTENTION)
        if not isinstance(rotary, dict):
            raise DSparkError(
                f"{place} names layer types without {FULL_ATTENTION}, which all layers are; write "
                "rope_theta at the top level instead"
            )
    if not isinstance(rotary, dict):
        raise DSparkError(
            f"{place} must be a mapping, not {brief(repr(rotary), 60)}; write rope_theta at the "
            "top level instead"
        )
    return rotary


def _require_plain(place: str, rotary: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise DSparkError unless a rotary embedding has a known type and no other scaling."""
    kinds = [rotary[key] for key in ("rope_type", "type") if rotary.get(key) is not None]
    neutral = dict(_ROTARY_NEUTRAL)
    if "proportional" in known:
        del neutral["partial_rotary_factor"]
    if any(kind in SCALED and kind in known for kind in kinds):
        del neutral["factor"]
    if YARN in kinds:
        neutral |= dict.fromkeys(_YARN_NEUTRAL, ())
    plain = all(_is_neutral(rotary.get(key), allowed) for key, allowed in neutral.items())
    if not plain or any(kind not in known for kind in kinds):
        raise _unsupported(place, dict(rotary))


def _scaling(raw: Mapping[str, Any]) -> Scaling | None:
    """Read the scaling of the rotary embedding; the places that describe it must agree."""
    places = ("rope_parameters", "rope_scaling")
    found = {place: read_scaling(place, _rotary(raw, place)) for place in places if raw.get(place)}
    if len(set(found.values())) > 1:
        raise DSparkError("rope_parameters and rope_scaling differ; remove the wrong one")
    return next(iter(found.values()), None)


def _positive(place: str, value: object) -> float:
    try:
        theta = number(value, 0.0, MOST_THETA)
    except ValueError:
        theta = 0.0
    if theta == 0:
        raise DSparkError(
            f"{place} must be a number above 0, not {brief(repr(value), 40)}; write the value that "
            "the drafter was trained with"
        )
    return theta


def _qwen3(raw: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    return {
        "num_kv_heads": fields.integer("num_key_value_heads", default=heads),
        "head_dim": fields.integer("head_dim", default=hidden // heads),
        "rope_theta": rope_theta(raw, ("default", *SCALED)),
        "rope_scaling": _scaling(raw),
    }


def _gemma4(raw: Mapping[str, Any]) -> dict[str, Any]:
    rotary = raw["rope_parameters"][FULL_ATTENTION]
    _require_plain(f"rope_parameters.{FULL_ATTENTION}", rotary, ("default", "proportional"))
    shared = bool(raw.get("attention_k_eq_v"))
    partial = rotary.get("rope_type") == "proportional"
    return {
        "family": "gemma4",
        "num_kv_heads": raw["num_global_key_value_heads" if shared else "num_key_value_heads"],
        "head_dim": raw["global_head_dim"],
        "keys_are_values": shared,
        "rope_theta": _positive(f"rope_parameters.{FULL_ATTENTION}", rotary["rope_theta"]),
        "rotary_share": rotary.get("partial_rotary_factor", 1.0) if partial else 1.0,
        "logit_softcap": raw.get("final_logit_softcapping"),
    }
