"""Read and write the shape of a drafter as the `config.json` that SGLang's DSPARK loads.

A drafter with experts, a window or several residual streams has an architecture name of our own,
which stock SGLang rejects. It has these keys in addition to the dense ones (DeepSeek's names if it
has any): `n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`, `n_shared_experts`,
`scoring_func` (sigmoid | softmax), `norm_topk_prob`, `routed_scaling_factor`, `sliding_window`
(context tokens that a block sees, or null) and `hc_mult` (residual streams). `expert_format` names
the format of quantised expert weights (quantisation/checkpoint.py). `window_is_causal` and
`window_exempt_layers` are written only for a drafter with a window that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import brief
from sglang_dspark.drafter import speculators
from sglang_dspark.drafter.families import refuse_unsupported, shape_fields
from sglang_dspark.drafter.fields import (
    MARKOV_HEADS,
    Fields,
    raw_config,
    reading_config,
    require_declared,
)
from sglang_dspark.drafter.rotary import Scaling
from sglang_dspark.errors import DSparkError
from sglang_dspark.quantisation.checkpoint import CONFIG_KEY, UNQUANTISED
from sglang_dspark.quantisation.formats import expert_format

FAMILIES = ("qwen3", "gemma4")
DENSE_ARCHITECTURES = ("DSparkDraftModel", "LingDSparkModel", "Qwen3DSparkModel")
GEMMA4_ARCHITECTURE = "Gemma4DSparkModel"
DFLASH_ARCHITECTURE = "DFlashDraftModel"  # families/dflash; can be converted
# SGLang's other families, which a server passes to SGLang. The reference engine computes none.
OTHER_ARCHITECTURES = (
    "DSparkMiniMaxDraftModel",
    "DeepseekV4ForCausalLMDSpark",
    "Lfm2DSparkDraftModel",
)
ROUTER_SCORES = ("sigmoid", "softmax")
MOE_ARCHITECTURE = "DSparkMoEModel"
MOE_MODEL_TYPE = "dspark_moe"
_MOE_KEYS = {  # field -> key of config.json
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "router_scores": "scoring_func",
    "normalise_weights": "norm_topk_prob",
    "routed_scaling": "routed_scaling_factor",
    "window": "sliding_window",
    "residual_streams": "hc_mult",
}
_WINDOW_KEYS = {  # absent where the field has its default
    "causal_window": "window_is_causal",
    "full_layers": "window_exempt_layers",
}


def read_config(path: Path) -> dict[str, Any]:
    """Read `config.json` of a drafter's directory, in SGLang's layout (drafter/speculators.py).

    Raises DSparkError if there is none, it is not JSON, or it is not supported.
    """
    raw = raw_config(path)
    if speculators.MARK not in raw:
        reduced = reduction_of(raw)
        return raw if reduced is None else {**raw, "markov_rank": reduced.widened_rank}
    with reading_config(path):
        plain = speculators.plain_config(raw, Path(path) / "config.json")
    return plain if plain["sliding_window"] is None else _with_window(plain)


def reduction_of(raw: Mapping[str, Any]) -> speculators.Reduction | None:
    """Return the sizes of a reduced vocabulary of an unchanged config, or None."""
    dense = raw.get("architectures") in [[name] for name in DENSE_ARCHITECTURES]
    return speculators.reduction(raw) if dense or speculators.MARK in raw else None


def _with_window(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite a dense drafter with a window to our own architecture, without experts."""
    dense = {field.name: field.default for field in fields_of(DrafterConfig)}
    keys = {key: dense[field] for field, key in _MOE_KEYS.items()}
    kind = {"architectures": [MOE_ARCHITECTURE], "model_type": MOE_MODEL_TYPE}
    return {**keys, **plain, **kind}


def architecture_of(raw: Mapping[str, Any], path: Path) -> str:
    """Return the one name in `architectures` of config.json, of a DSpark drafter.

    Raises DSparkError for none, several and an unknown one.
    """
    names = raw.get("architectures")
    known = (*DENSE_ARCHITECTURES, *OTHER_ARCHITECTURES, GEMMA4_ARCHITECTURE, MOE_ARCHITECTURE)
    if isinstance(names, list) and len(names) == 1 and names[0] in known:
        return str(names[0])
    if names == [DFLASH_ARCHITECTURE]:
        raise DSparkError(
            f"drafter {path}: architectures {names} in config.json is no DSpark drafter; write one "
            f"that is scheduled: dspark models convert {path} --target TARGET --out FOLDER, or "
            "serve it with --speculative-algorithm DFLASH"
        )
    raise DSparkError(
        f"drafter {path}: architectures {brief(names, 60)} in config.json is no DSpark drafter "
        f"(known: {', '.join(sorted(known))}); name another drafter (--drafter; of a server "
        "--speculative-draft-model-path)"
    )


def require_computed(raw: Mapping[str, Any], path: Path) -> None:
    """Raise DSparkError for a DSpark drafter that the reference engine does not compute.

    SGLang serves it: another family, or quantised dense layers.
    """
    name = architecture_of(raw, path)
    what = None
    if name in OTHER_ARCHITECTURES:
        what = f"architectures ['{name}'] is a family"
    elif raw.get("quantization_config") is not None:
        what = "quantization_config in config.json describes quantised weights"
    if what is not None:
        raise DSparkError(
            f"drafter {path}: {what} that only SGLang computes; serve it as it is, or name a "
            "drafter with weights in float32, bfloat16 or float16"
        )


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter: `num_layers` layers of width `hidden_size`, block of `gamma` positions.

    target_layer_ids: target layers whose outputs, concatenated, are the context features.
    mask_token_id: id whose embedding is used at the gamma-1 positions after the anchor.
    markov_rank: rank of the transition bias B = W1 W2^T (paper, 3.1.2).
    family: of its layers; the three fields after it are for gemma4 only (drafter/gemma4.py).
    num_experts: routed experts of every layer, 0 for a dense MLP (drafter/moe.py).
    sample_from_anchor: True: the block is [anchor, mask x (gamma-1)] and each row drafts. False: it
        is [anchor, mask x gamma], and row 0, which training ignores, drafts nothing ("1+N").
    window: context tokens before its anchor that a block sees; None: all.
    causal_window: a row of the block sees only rows up to its own, in the layers with a window.
    rope_scaling: of the rotary embedding; None: it is not scaled.
    full_layers: layers of a drafter with a window that see all of the context; None: no layer.
    residual_streams: n of drafter/hyper_connections.py; 1 is the plain residual.
    expert_format: format of expert weights in the file (quantisation/formats.py); they are
        computed in float32.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    gamma: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    markov_rank: int
    markov_head_type: str = "vanilla"
    confidence_head: bool = True
    confidence_head_with_markov: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192
    family: str = "qwen3"
    keys_are_values: bool = False
    rotary_share: float = 1.0
    logit_softcap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0
    router_scores: str = "sigmoid"
    normalise_weights: bool = True
    routed_scaling: float = 1.0
    window: int | None = None
    residual_streams: int = 1
    expert_format: str = UNQUANTISED
    sample_from_anchor: bool = True
    causal_window: bool = False
    full_layers: tuple[int, ...] | None = None
    rope_scaling: Scaling | None = None

    def __post_init__(self) -> None:
        def require(ok: bool, what: str) -> None:
            if not ok:
                raise DSparkError(f"drafter config: {what}")

        require_declared(self)
        require(self.gamma >= 1, f"gamma must be at least 1, found {self.gamma}")
        require(self.markov_rank >= 1, f"markov_rank must be at least 1, found {self.markov_rank}")
        require(
            self.markov_head_type in MARKOV_HEADS,
            f"markov_head_type {self.markov_head_type!r} is none of {', '.join(MARKOV_HEADS)}",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads",
        )
        require(self.family in FAMILIES, f"family {self.family!r} is none of {FAMILIES}")
        require(bool(self.target_layer_ids), "target_layer_ids is empty")
        bad = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        last = self.num_target_layers - 1
        require(
            not bad,
            f"target_layer_ids {bad} lie outside the target's layers 0..{last}; use a drafter "
            "trained for this target",
        )
        require(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} lies outside the vocabulary of {self.vocab_size}; "
            "use a drafter trained for this target",
        )
        self._check_window(require)
        streams = self.residual_streams
        require(streams >= 1, f"residual_streams must be at least 1, found {streams}")
        self._check_experts(require)

    def _check_window(self, require: Callable[[bool, str], None]) -> None:
        require(self.window is None or self.window >= 1, f"window {self.window} shows no context")
        whole = self.full_layers or ()
        require(
            self.window is not None or not (self.causal_window or whole),
            "window_is_causal or window_exempt_layers without sliding_window",
        )
        last = self.num_layers - 1
        require(all(i <= last for i in whole), f"window_exempt_layers {whole} exceed layer {last}")
        require(
            self.sample_from_anchor or self.markov_head_type != "rnn",
            "sample_from_anchor false with markov_head_type 'rnn', whose state begins at the "
            "anchor's row, is not computed; use a drafter with another Markov head",
        )

    def _check_experts(self, require: Callable[[bool, str], None]) -> None:
        require(
            self.family == "qwen3" or not self.extended,
            f"{self.family} layers have no experts, window or residual streams",
        )
        expert_format(self.expert_format)
        if not self.num_experts:
            require(self.expert_format == UNQUANTISED, "expert_format without experts")
            return
        require(
            1 <= self.experts_per_token <= self.num_experts,
            f"experts_per_token {self.experts_per_token} not in 1..{self.num_experts}",
        )
        require(
            self.moe_intermediate_size >= 1 and self.num_shared_experts >= 0,
            f"moe_intermediate_size {self.moe_intermediate_size} or num_shared_experts "
            f"{self.num_shared_experts} is too small",
        )
        require(
            self.router_scores in ROUTER_SCORES,
            f"router_scores {self.router_scores!r} is none of {', '.join(ROUTER_SCORES)}",
        )

    @property
    def extended(self) -> bool:
        """Return whether it has experts, a window or streams, which served dense drafters lack."""
        return bool(self.num_experts) or self.window is not None or self.residual_streams != 1

    def has_window(self, layer: int) -> bool:
        """Return whether a layer sees only a window of the context."""
        return self.window is not None and layer not in (self.full_layers or ())

    @classmethod
    def from_dir(cls, path: Path) -> DrafterConfig:
        """Read `config.json` of a directory. Raises DSparkError that names a missing field."""
        return cls.from_json(read_config(path), path)

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path, *, computed: bool = True) -> DrafterConfig:
        """Read the contents of `path`/config.json. Raises DSparkError that names a missing field.

        computed: False also reads drafters that only SGLang computes (`require_computed`).
        """
        with reading_config(path):
            if not computed:  # SGLang reads its own rotary fields; they are not used here
                raw = {**raw, "rope_theta": 1.0, "rope_parameters": None, "rope_scaling": None}
            fields = Fields(raw, path)
            if computed:
                refuse_unsupported(raw, fields)
            return cls._from_json(raw, fields)

    @classmethod
    def _from_json(cls, raw: dict[str, Any], fields: Fields) -> DrafterConfig:
        ours = MOE_ARCHITECTURE in (raw.get("architectures") or [])
        extension = {field: raw[key] for field, key in _MOE_KEYS.items()} if ours else {}
        if ours:
            extension["expert_format"] = raw.get(CONFIG_KEY, UNQUANTISED)
            extension |= {f: raw[key] for f, key in _WINDOW_KEYS.items() if raw.get(key)}
        if extension.get("full_layers"):
            extension["full_layers"] = tuple(extension["full_layers"])
        layers = fields.layer_ids()
        return cls(
            **shape_fields(raw, fields),
            **extension,
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=fields.integer("num_attention_heads"),
            vocab_size=fields.integer("vocab_size"),
            gamma=fields.integer("block_size"),
            target_layer_ids=layers,
            # by default the least that the layers need
            num_target_layers=fields.integer("num_target_layers", default=max(layers) + 1),
            mask_token_id=fields.integer("mask_token_id", least=0),
            markov_rank=fields.integer("markov_rank"),
            markov_head_type=fields.markov_head(),
            sample_from_anchor=fields.flag("sample_from_anchor", True),
            confidence_head=fields.flag("enable_confidence_head", True),
            confidence_head_with_markov=fields.flag("confidence_head_with_markov", True),
            rms_norm_eps=fields.number("rms_norm_eps", 1.0, 1e-6),
            max_position_embeddings=fields.integer("max_position_embeddings", default=8192),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the `config.json` that this class and, unless `extended`, stock SGLang read."""
        plain = self._plain_json()
        if not self.sample_from_anchor:
            plain["sample_from_anchor"] = False
        if self.rope_scaling is not None:
            plain["rope_parameters"] = self.rope_scaling.to_json(self.rope_theta)
        if not self.extended:
            return plain
        extension = {key: getattr(self, field) for field, key in _MOE_KEYS.items()}
        extension |= {
            key: getattr(self, field) for field, key in _WINDOW_KEYS.items() if getattr(self, field)
        }
        if self.expert_format != UNQUANTISED:
            extension[CONFIG_KEY] = self.expert_format
        return (
            plain | {"architectures": [MOE_ARCHITECTURE], "model_type": MOE_MODEL_TYPE} | extension
        )

    def _plain_json(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position_embeddings,
            "block_size": self.gamma,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token_id": self.mask_token_id,
            },
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": self.confidence_head_with_markov,
        }
