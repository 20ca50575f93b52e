"""Read the layout of the `speculators` library (its models/dspark/config.py).

A drafter's shape is nested in `transformer_layer_config`. Target layers are counted as
Transformers' hidden states, from 1.

The weights have the names of SGLang's DSPARK. A drafter over the whole vocabulary does not use its
copy of the LM head, which is the target's; one over a part of it: drafter/reduced_vocabulary.py.

`sample_from_anchor` sets the first row of a block that drafts. true: row 0, the anchor's, drafts
the token after it, and block_size rows draft. false: row 0 has no loss and drafts nothing, row k
drafts the k-th token after the anchor, and block_size - 1 rows draft.

In a layer of `sliding_attention` every row sees the last `sliding_window` tokens before the anchor,
and of its block the rows up to its own; with `sliding_window_non_causal` all of them.

A field of the layout that we do not compute is rejected by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import brief
from sglang_dspark.errors import DSparkError

MARK = "speculators_model_type"
_LAYERS = "transformer_layer_config"
_FEATURES = "aux_hidden_state_layer_ids"
_FLAT_KIND = "speculator_model"  # `model_type` of the library's own config class
_ANOTHER = "name another drafter"
_RANKS = 16  # a loaded Markov head's rank is a multiple, which the CPU kernels read fastest
# The library writes only fields that differ from Transformers' Qwen3Config.
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
_OF_SPECULATORS = (MARK, "speculators_config", "speculators_version", _FEATURES, "draft_vocab_size")
_WINDOW_FIELDS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_WINDOW, _FIRST_WINDOWED = 4096, 28  # Qwen3Config's sliding_window and max_window_layers
_SLIDING, _FULL = "sliding_attention", "full_attention"
_HEADS: Mapping[str, Any] = {  # of DSparkSpeculatorConfig, with its defaults
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


@dataclass(frozen=True)
class Reduction:
    """Sizes of a reduced vocabulary. columns: V'. rank: r of the stored Markov head."""

    columns: int
    rank: int

    @property
    def widened_rank(self) -> int:
        """Return the rank of the loaded head, with the restriction and padding."""
        return -(-(self.rank + 1) // _RANKS) * _RANKS


def plain_config(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the `config.json` of SGLang's DSPARK that is equivalent to `raw`, read from `file`.

    It has no `num_target_layers`, as the layout has none. `sliding_window` is null if every layer
    sees everything. With a reduced vocabulary, `markov_rank` is the loaded head's. Raises
    DSparkError that names the field that is missing, malformed, or not computed here.
    """
    shape = _shape_of(raw)
    for field, value, ok, known, fix in _demands(raw, shape):
        if not ok:
            raise DSparkError(
                f"{file}: {field} is {brief(repr(value), 60)}; of the Speculators layout only "
                f"{known} read: {fix}"
            )
    heads = {name: raw.get(name, default) for name, default in _HEADS.items()}
    reduced = reduction(raw)
    if reduced is not None:
        heads["markov_rank"] = reduced.widened_rank
    anchor, rotary = raw["sample_from_anchor"], shape.get("rope_parameters")
    if isinstance(rotary, dict) and isinstance(rotary.get(_SLIDING), dict):
        shape["rope_parameters"] = rotary[_SLIDING]  # of all layers, as the library computes it
    return {
        **{name: value for name, value in shape.items() if name not in _WINDOW_FIELDS},
        **_window(raw, shape),
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": raw["block_size"] - (0 if anchor else 1),
        "sample_from_anchor": anchor,
        "dflash_config": {
            "target_layer_ids": [i - 1 for i in raw[_FEATURES]],
            "mask_token_id": raw["mask_token_id"],
        },
        **heads,
    }


def _is_flat(raw: Mapping[str, Any]) -> bool:
    """Return whether the layers' fields are at the top level, as vLLM's reader writes them."""
    return _LAYERS not in raw and "hidden_size" in raw


def _shape_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers' config with its defaults; empty if there is none."""
    layers = raw.get(_LAYERS)
    if _is_flat(raw):
        layers = {name: value for name, value in raw.items() if name not in _OF_SPECULATORS}
    return {**QWEN3_DEFAULTS, **layers} if isinstance(layers, dict) else {}


def reduction(raw: Mapping[str, Any]) -> Reduction | None:
    """Return the sizes of a reduced vocabulary, or None.

    raw: a config that `plain_config` reads, or one of SGLang's layout.
    """
    columns = raw.get("draft_vocab_size")
    if MARK in raw:
        whole, rank = _shape_of(raw)["vocab_size"], raw.get("markov_rank", _HEADS["markov_rank"])
    else:
        whole, rank = raw.get("vocab_size"), raw.get("markov_rank")
    sizes = (columns, whole, rank)
    if columns is None or columns == whole or not all(type(size) is int for size in sizes):
        return None
    return Reduction(columns, rank)


def _window(raw: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the layers with a window by our own keys (drafter/config.py)."""
    kinds = _layer_kinds(shape)
    if _SLIDING not in kinds:
        return {"sliding_window": None}
    return {
        "sliding_window": shape.get("sliding_window", _WINDOW),
        "window_is_causal": not raw.get("sliding_window_non_causal"),
        "window_exempt_layers": [i for i, kind in enumerate(kinds) if kind == _FULL],
    }


def _layer_kinds(shape: Mapping[str, Any]) -> list[Any]:
    """Return the attention of each layer; without `layer_types`, as Transformers derives it."""
    kinds = shape.get("layer_types")
    if kinds is not None:
        return list(kinds) if isinstance(kinds, list) else [kinds]
    count, first = shape["num_hidden_layers"], shape.get("max_window_layers", _FIRST_WINDOWED)
    windowed = shape.get("use_sliding_window") and shape.get("sliding_window", _WINDOW) is not None
    if type(count) is not int or type(first) is not int or not windowed:
        return []
    return [_SLIDING if i >= first else _FULL for i in range(min(count, 1024))]


_Demand = tuple[str, object, bool, str, str]


def _demands(raw: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[_Demand]:
    """Yield each field, its value, whether it is supported, the supported values, and the fix.

    The most informative ones come first. shape: the layers' config with its defaults, or empty.
    """
    yield MARK, raw[MARK], raw[MARK] == "dspark", "`dspark` is", _ANOTHER
    yield _LAYERS, raw.get(_LAYERS), bool(shape), "a mapping is", _ANOTHER
    kind = shape.get("model_type", "qwen3")
    kind = "qwen3" if kind == _FLAT_KIND and _is_flat(raw) else kind
    yield f"{_LAYERS}.model_type", kind, kind == "qwen3", "`qwen3` layers are", _ANOTHER
    first = raw.get("sample_from_anchor")
    fix = (
        "write into config.json how it was trained, `true` if the anchor's row drafts the next "
        "token, or `false` if that row drafts nothing, as before the library wrote this field"
    )
    yield "sample_from_anchor", first, type(first) is bool, "`true` and `false` are", fix
    quantised = raw.get("quantization_config")
    yield "quantization_config", quantised, quantised is None, "weights in floats are", _ANOTHER
    yield from _window_demands(raw, shape)
    yield from _size_demands(raw, shape)
    ids = raw.get(_FEATURES)
    counted = isinstance(ids, list) and all(type(i) is int and i >= 1 for i in ids)
    yield _FEATURES, ids, counted, "a list of integers from 1 is", _ANOTHER
    least, size = (1 if first else 2), raw.get("block_size")
    whole = type(size) is int and size >= least
    yield "block_size", size, whole, f"an integer from {least} is", _ANOTHER
    mask = raw.get("mask_token_id")
    fix = "write the id whose embedding it was trained with at the masked positions"
    yield "mask_token_id", mask, type(mask) is int and mask >= 0, "an integer from 0 is", fix


def _window_demands(raw: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[_Demand]:
    for name in () if _is_flat(raw) else ("sliding_window", "use_sliding_window"):
        known = f"one in {_LAYERS} is"
        yield name, raw.get(name), raw.get(name) in (None, False), known, _ANOTHER
    kinds, use = _layer_kinds(shape), shape.get("use_sliding_window")
    fix = "correct the drafter's config.json"
    known = f"`{_FULL}` and `{_SLIDING}` are"
    named = all(kind in (_FULL, _SLIDING) for kind in kinds)
    yield f"{_LAYERS}.layer_types", shape.get("layer_types"), named, known, _ANOTHER
    if kinds:
        count = shape["num_hidden_layers"]
        yield (
            f"{_LAYERS}.layer_types",
            shape.get("layer_types"),
            len(kinds) == count,
            f"one kind for each of {brief(count, 20)} layers is",
            fix,
        )
    if _SLIDING not in kinds:
        return
    known = f"`true` next to `{_SLIDING}` is"
    yield f"{_LAYERS}.use_sliding_window", use, use is True, known, fix
    window = shape.get("sliding_window", _WINDOW)
    counted = type(window) is int and window >= 1
    yield f"{_LAYERS}.sliding_window", window, counted, "an integer from 1 is", fix
    order = raw.get("sliding_window_non_causal", False)
    flag = type(order) is bool
    yield "sliding_window_non_causal", order, flag, "`true` and `false` are", fix


def _size_demands(raw: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[_Demand]:
    drafted, whole = raw.get("draft_vocab_size"), shape["vocab_size"]
    known = f"an integer up to the vocabulary ({brief(whole, 40)}) is"
    fits = type(drafted) is int and type(whole) is int and 1 <= drafted <= whole
    yield "draft_vocab_size", drafted, fits, known, _ANOTHER
    rank = raw.get("markov_rank", _HEADS["markov_rank"])
    yield "markov_rank", rank, type(rank) is int and rank >= 1, "an integer from 1 is", _ANOTHER
    width, own = raw.get("target_hidden_size"), shape["hidden_size"]
    known = f"drafters of the target's width ({brief(own, 40)}) are"
    yield "target_hidden_size", width, width in (None, own), known, _ANOTHER
