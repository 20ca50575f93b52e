"""The layout of the `speculators` library (its models/dspark/config.py): a drafter's shape nested
in `transformer_layer_config`, target layers counted as Transformers' hidden states, from 1.

The weights have the names of SGLang's DSPARK. A drafter over the whole vocabulary does not store
the LM head, which is the target's. What of the layout we do not compute is refused by its field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import brief
from sglang_dspark.errors import DSparkError

MARK = "speculators_model_type"
_LAYERS = "transformer_layer_config"
_FEATURES = "aux_hidden_state_layer_ids"
# The library writes what differs from Transformers' Qwen3Config alone.
QWEN3_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
_HEADS: Mapping[str, Any] = {  # of DSparkSpeculatorConfig, with its defaults
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def plain_config(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The `config.json` of SGLang's DSPARK that says the same as `raw`, read from `file`.

    It names no `num_target_layers`: the layout does not tell.
    Raises DSparkError naming the field that is missing, malformed, or not computed here.
    """
    layers = raw.get(_LAYERS)
    shape = {**QWEN3_DEFAULTS, **layers} if isinstance(layers, dict) else {}
    for field, value, ok, known in _demands(raw, shape):
        if not ok:
            raise DSparkError(
                f"{file}: {field} is {brief(repr(value), 60)}; of the Speculators layout only "
                f"{known} read: name another drafter"
            )
    features = raw[_FEATURES]
    return {
        **shape,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": raw["block_size"],
        "dflash_config": {
            "target_layer_ids": [i - 1 for i in features],
            "mask_token_id": raw["mask_token_id"],
        },
        **{name: raw.get(name, default) for name, default in _HEADS.items()},
    }


def _demands(
    raw: Mapping[str, Any], shape: Mapping[str, Any]
) -> Iterator[tuple[str, object, bool, str]]:
    """Field, its value, whether it is read, and what is; the more telling ones first.

    shape: the layers' config with its defaults, empty where there is none.
    """
    yield MARK, raw[MARK], raw[MARK] == "dspark", "`dspark` is"
    yield _LAYERS, raw.get(_LAYERS), bool(shape), "a mapping is"
    kind = shape.get("model_type", "qwen3")
    yield f"{_LAYERS}.model_type", kind, kind == "qwen3", "`qwen3` layers are"
    first = raw.get("sample_from_anchor")  # earlier versions wrote none and drafted from the mask
    yield "sample_from_anchor", first, first is True, "`true`, written out, is"
    quantised = raw.get("quantization_config")
    yield "quantization_config", quantised, quantised is None, "weights in floats are"
    for name in ("sliding_window", "use_sliding_window"):
        yield name, raw.get(name), raw.get(name) in (None, False), "full attention is"
    drafted, whole = raw.get("draft_vocab_size"), shape["vocab_size"]
    known = f"drafters over the whole vocabulary ({brief(whole, 40)}) are"
    yield "draft_vocab_size", drafted, drafted == whole, known
    width, own = raw.get("target_hidden_size"), shape["hidden_size"]
    known = f"drafters of the target's width ({brief(own, 40)}) are"
    yield "target_hidden_size", width, width in (None, own), known
    ids = raw.get(_FEATURES)
    counted = isinstance(ids, list) and all(type(i) is int and i >= 1 for i in ids)
    yield _FEATURES, ids, counted, "a list of integers from 1 is"
    for name in ("block_size", "mask_token_id"):
        yield name, raw.get(name), type(raw.get(name)) is int, "an integer is"
