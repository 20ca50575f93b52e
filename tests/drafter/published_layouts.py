"""Layouts that trainers write: where fields are in config.json, and what the weight files hold.

Each `Layout` is a drafter of tests/drafter/published.py and changes of its directory, which leave
what it drafts as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.drafter.published import THETA, Published

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 100,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
WHOLE = {"columns": 61}
WINDOW = {"window": 6, "sliding": (0, 1)}
Raw = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """form: writes config.json of the drafter's. change: of it, in place. d2t: what it holds.
    has_heads: False for DFlash, which has no sequential and no confidence head."""

    name: str
    drafter: Mapping[str, Any]
    form: Callable[[Published], Raw]
    change: Callable[[Raw], Any] = lambda raw: None
    d2t: str = "offsets"
    dropped: tuple[str, ...] = ()
    prefix: str = ""
    files: int = 1
    dtype: torch.dtype = torch.float32
    has_heads: bool = True

    def published(self) -> Published:
        """The drafter that the reference computes."""
        p = Published(**self.drafter)
        p.tensors = {
            n: t.to(self.dtype).float() if t.is_floating_point() else t
            for n, t in p.tensors.items()
        }
        if not self.has_heads:
            for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
                p.tensors[name].zero_()
        return p

    def write(self, p: Published, path: Path) -> Path:
        """Write the drafter in this layout."""
        raw = self.form(p)
        self.change(raw)
        heads = () if self.has_heads else ("markov_head", "confidence_head")
        kept = {n: t for n, t in p.tensors.items() if not n.startswith((*self.dropped, *heads))}
        if self.d2t == "ids" and "d2t" in kept:
            kept["d2t"] = p.token_ids()
        kept = {
            f"{self.prefix}{n}": t.to(self.dtype) if t.is_floating_point() else t
            for n, t in kept.items()
        }
        path.mkdir()
        (path / "config.json").write_text(json.dumps(raw))
        names = [f"model-{i}.safetensors" for i in range(self.files)]
        names = names if self.files > 1 else ["model.safetensors"]
        places = {n: names[i % len(names)] for i, n in enumerate(kept)}
        for file in names:
            save_file({n: t for n, t in kept.items() if places[n] == file}, path / file)
        if self.files > 1:
            index = path / "model.safetensors.index.json"
            index.write_text(json.dumps({"weight_map": places}))
        return path


def nested(p: Published) -> Raw:
    """Speculators: the layers' fields in `transformer_layer_config`."""
    return p.config()


def flat(p: Published) -> Raw:
    """Speculators: the layers' fields at the top level."""
    raw = p.config()
    return {**raw.pop("transformer_layer_config"), **raw, "model_type": "speculator_model"}


def dense(p: Published) -> Raw:
    """DeepSpec and SpecForge: all fields at the top level, rows that draft counted."""
    layers = p.config()["transformer_layer_config"]
    window = ("sliding_window", "use_sliding_window", "layer_types")
    return {
        **{name: value for name, value in layers.items() if name not in window},
        "architectures": ["Qwen3DSparkModel"],
        "block_size": p.block - (0 if p.from_anchor else 1),
        "sample_from_anchor": p.from_anchor,
        "draft_vocab_size": p.columns,
        "target_layer_ids": [i - 1 for i in p.features],
        "mask_token_id": p.mask_id,
        "num_target_layers": 4,
        "markov_rank": p.rank,
        "markov_head_type": p.markov,
        "confidence_head_with_markov": p.with_markov,
        "enable_confidence_head": True,
    }


def dflash(p: Published) -> Raw:
    """DFlash: block_size counts the anchor; target layers and mask token in `dflash_config`."""
    raw = {**dense(p), "architectures": ["DFlashDraftModel"], "block_size": p.block}
    names = ("target_layer_ids", "mask_token_id")
    return {**raw, "dflash_config": {name: raw.pop(name) for name in names}}


def rope_theta_alone(raw: Raw) -> None:
    """As Transformers before version 5."""
    layers = raw.get("transformer_layer_config", raw)
    del layers["rope_parameters"]
    layers["rope_theta"] = THETA


def rope_scaling(raw: Raw) -> None:
    """As Transformers before version 5, with a scaling."""
    layers = raw.get("transformer_layer_config", raw)
    rotary = layers.pop("rope_parameters")
    layers["rope_theta"] = rotary.pop("rope_theta")
    layers["rope_scaling"] = rotary


def _both_rope(raw: Raw) -> None:
    raw.get("transformer_layer_config", raw)["rope_theta"] = THETA


def _null_window(raw: Raw) -> None:
    raw.get("transformer_layer_config", raw)["sliding_window"] = None


def _old_dtype(raw: Raw) -> None:
    raw.pop("dtype", None)
    raw["torch_dtype"] = "float32"


def _no_sampling_field(raw: Raw) -> None:
    del raw["sample_from_anchor"]


def layouts() -> Iterator[Layout]:
    """Yield every combination that is tested, each under a name of its own."""
    for where, form in (("nested", nested), ("flat", flat), ("dense", dense)):
        yield Layout(f"{where}, whole", WHOLE, form)
        yield Layout(f"{where}, d2t of offsets", {}, form)
        yield Layout(f"{where}, d2t of ids", {}, form, d2t="ids")
        yield Layout(f"{where}, offsets without t2d", {}, form, dropped=("t2d",))
        yield Layout(f"{where}, ids without t2d", {}, form, d2t="ids", dropped=("t2d",))
        yield Layout(f"{where}, 1 + N", {"from_anchor": False}, form)
        yield Layout(f"{where}, gated", {"markov": "gated"}, form)
        yield Layout(f"{where}, rnn", {"markov": "rnn"}, form)
        yield Layout(f"{where}, rope_theta alone", WHOLE, form, rope_theta_alone)
        yield Layout(f"{where}, rope_theta twice", WHOLE, form, _both_rope)
        yield Layout(f"{where}, llama3", {"rotary": LLAMA3}, form)
        yield Layout(f"{where}, llama3 in rope_scaling", {"rotary": LLAMA3}, form, rope_scaling)
        yarn = {"rotary": YARN, "head_dim": 16}
        yield Layout(f"{where}, yarn", yarn, form)
        yield Layout(f"{where}, yarn in rope_scaling", yarn, form, rope_scaling)
        yield Layout(f"{where}, window null", WHOLE, form, _null_window)
        yield Layout(f"{where}, torch_dtype", WHOLE, form, _old_dtype)
        yield Layout(f"{where}, bfloat16", {}, form, dtype=torch.bfloat16)
        yield Layout(f"{where}, no LM head", {}, form, dropped=("lm_head", "embed_tokens"))
        yield Layout(f"{where}, shards", {}, form, files=3)
        yield Layout(f"{where}, mask token of the end", {"mask_id": 1}, form)
        for prefix in ("model.", "module.", "_orig_mod."):
            yield Layout(f"{where}, {prefix}", {}, form, prefix=prefix)
    yield Layout("dense, no sample_from_anchor", WHOLE, dense, _no_sampling_field)
    for where, form in (("nested", nested), ("flat", flat)):
        yield Layout(f"{where}, window", WINDOW, form)
        yield Layout(f"{where}, window, bidirectional", {**WINDOW, "non_causal": True}, form)
        yield Layout(f"{where}, window, yarn", {**WINDOW, "rotary": YARN, "head_dim": 16}, form)
    parallel = {"from_anchor": False}
    for name, shape, how in (
        ("whole", WHOLE, {}),
        ("d2t of offsets", {}, {}),
        ("d2t of ids", {}, {"d2t": "ids"}),
        ("yarn", {"rotary": YARN, "head_dim": 16}, {}),
        ("rope_theta alone", WHOLE, {"change": rope_theta_alone}),
        ("shards", {}, {"files": 2}),
        ("module.", {}, {"prefix": "module."}),
    ):
        yield Layout(f"DFlash, {name}", {**parallel, **shape}, dflash, has_heads=False, **how)
