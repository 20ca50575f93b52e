"""Drafters' directories that are broken or odd, made from one small valid drafter.

Each variant names what a reader is to do with it: TAKEN by every reader; REFUSED by every one, with
a part of the line that says so; CONVERT, read right here and by a server after conversion; SERVED,
which only SGLang computes; UNSERVED, which SGLang alone refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dspark.drafter import save_drafter
from sglang_dspark.drafter.weight_files import INDEX
from tests.drafter.helpers import tiny_drafter
from tests.drafter.test_speculators import written

TAKEN, REFUSED, CONVERT, SERVED, UNSERVED = "taken", "refused", "convert", "served", "unserved"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
Change = Callable[[Path], None]
Tensors = dict[str, Tensor]
ABSENT = "(absent)"
ROW = {"sample_from_anchor": False}


@dataclass(frozen=True)
class Variant:
    """A directory. make: writes it. says: a part of the line, of a server for CONVERT."""

    name: str
    make: Change
    verdict: str
    says: str = ""


def config_of(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / CONFIG
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def weights_of(path: Path, change: Callable[[Tensors], Tensors | None]) -> None:
    tensors = load_file(path / WEIGHTS)
    changed = change(tensors)
    save_file(tensors if changed is None else changed, path / WEIGHTS, {"format": "pt"})


def dense(path: Path) -> None:
    save_drafter(tiny_drafter(target_layer_ids=(0, 2)), path)


def speculators(**changes: Any) -> Change:
    return lambda path: void(written(path, tiny_drafter(), **changes))


def void(_: object) -> None:
    """Drop a value."""


def field(name: str, value: object, base: Change = dense) -> Change:
    """The drafter with another value of a field; in `dflash_config` where it is there."""

    def make(path: Path) -> None:
        base(path)

        def change(raw: dict[str, Any]) -> None:
            nested = raw.get("dflash_config", {})
            place = nested if name in nested else raw
            if value is ABSENT:
                place.pop(name)
            else:
                place[name] = value

        config_of(path, change)

    return make


def tensors(change: Callable[[Tensors], Tensors | None], base: Change = dense) -> Change:
    def make(path: Path) -> None:
        base(path)
        weights_of(path, change)

    return make


def after(change: Change, base: Change = dense) -> Change:
    def make(path: Path) -> None:
        base(path)
        change(path)

    return make


def variants() -> Iterator[Variant]:
    yield Variant("valid", dense, TAKEN)
    yield from _scalars()
    yield from _computed()
    yield from _rope()
    yield from _layout()
    yield from _speculators()
    yield from _values()
    yield from _names()
    yield from _files()
    yield from _families()


def _scalars() -> Iterator[Variant]:
    """Fields x values of a wrong type, beyond their range, or of another target."""
    sizes = ("hidden_size", "vocab_size", "num_hidden_layers", "block_size", "markov_rank")
    for name in (*sizes, "num_attention_heads", "intermediate_size"):
        for value in (0, -1, "5", 5.0, True, None, [5], 10**30):
            says = "drafter config" if value == 10**30 else f"{name} in config.json must be"
            if name == "vocab_size" and value == 10**30:
                says = "vocab_size"
            yield Variant(f"{name} {value!r}", field(name, value), REFUSED, says)
    for name in (*sizes, "num_attention_heads", "intermediate_size"):
        says = "is missing; is this a DSpark drafter?"
        yield Variant(f"{name} absent", field(name, ABSENT), REFUSED, says)
    for name, value, says in (
        ("rms_norm_eps", "1e-6", "rms_norm_eps in config.json must be a number from 0 to 1"),
        ("rms_norm_eps", -1.0, "rms_norm_eps in config.json must be a number"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps in config.json must be a number"),
        ("enable_confidence_head", "yes", "enable_confidence_head in config.json must be true or"),
        ("confidence_head_with_markov", 1, "confidence_head_with_markov in config.json must be"),
        ("max_position_embeddings", "8192", "max_position_embeddings in config.json must be"),
        ("mask_token_id", 61, "mask_token_id 61 lies outside the vocabulary of 61"),
        ("mask_token_id", -1, "mask_token_id in config.json must be an integer >= 0"),
        ("markov_head_type", "linear", "markov_head_type 'linear' in config.json is unknown"),
        ("target_layer_ids", [0, 4], "target_layer_ids [4] lie outside the target's layers 0..3"),
        ("target_layer_ids", [], "target_layer_ids in config.json must be a list of integers"),
        ("num_target_layers", 9, "num_target_layers is 9, but the target"),
        ("num_key_value_heads", 3, "4 heads cannot share 3 key/value heads"),
        ("hidden_size", 64, "hidden_size is 64, but the target"),
        ("vocab_size", 99, "vocab_size is 99, but the target"),
        ("intermediate_size", 64, "has shape [48, 32], but config.json implies [64, 32]"),
        ("block_size", 3, ""),
        ("num_target_layers", ABSENT, ""),
        ("rms_norm_eps", 1e-5, ""),
        ("rms_norm_eps", ABSENT, ""),
        ("enable_confidence_head", False, ""),
        ("sliding_window", 4096, ""),  # Transformers uses it with use_sliding_window alone
        ("head_dim", 16, "has shape [32, 32], but config.json implies [64, 32]"),
        ("architectures", [], "architectures [] in config.json is no"),
        ("architectures", ["GPT2LMHeadModel"], "GPT2LMHeadModel'] in config.json is no"),
        ("dflash_config", [1], "dflash_config in config.json must be a mapping, not [1]"),
        ("dspark_config", {"block_size": 7}, "block_size in config.json is 4 in one place and 7"),
    ):
        yield Variant(f"{name} = {value!r}", field(name, value), REFUSED if says else TAKEN, says)


def _computed() -> Iterator[Variant]:
    """Yield settings that SGLang's class alone computes, or that nothing computes."""
    for name, value in (
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("layer_types", "full_attention"),
        ("use_gemma_norm", True),
        ("is_causal", True),
        ("is_neox_style", False),
        ("partial_rotary_factor", 0.5),
        ("attention_sink_bias", True),
        ("attention_value_scale", 2.0),
        ("conv_kernel_size", 3),
        ("projector_type", "domino"),
        ("use_sliding_window", True),
        ("dspark_block_size", 3),
        ("text_config", {}),
    ):
        says = f"{name} {value!r} is not supported"
        yield Variant(f"{name} {value!r}", field(name, value), REFUSED, says)
    yield Variant("layers", field("layer_types", ["full_attention"]), REFUSED, "names 1 layers and")
    yield Variant("1 + N", field("sample_from_anchor", False), TAKEN)
    says = "sample_from_anchor in config.json must be true or false"
    yield Variant("1 + N, null", field("sample_from_anchor", None), REFUSED, says)
    yield Variant("neutral", field("attention_bias", None), TAKEN)
    yield Variant("full", field("layer_types", ["full_attention"] * 2), TAKEN)
    quantised = field("quantization_config", {"quant_algo": "W4A16_NVFP4"})
    yield Variant("quantization_config", quantised, SERVED, "that only SGLang computes")


def _rope() -> Iterator[Variant]:
    """Places and values of the rotary embedding's base."""
    for value in (0, 0.0, -1.0, "100000", True, [1e4], 1e300):
        says = "rope_theta must be a number above 0"
        yield Variant(f"rope_theta {value!r}", field("rope_theta", value), REFUSED, says)
    bare = field("rope_theta", ABSENT)
    yield Variant("no rope_theta", bare, REFUSED, "rope_theta is missing")
    for place in ("rope_parameters", "rope_scaling"):
        inside = {"rope_type": "default", "rope_theta": 5e4}
        yield Variant(f"only in {place}", field(place, inside, bare), TAKEN)
        yield Variant(f"twice in {place}", field(place, inside), REFUSED, "remove the wrong one")
        by_type = {"full_attention": inside}
        yield Variant(f"by type in {place}", field(place, by_type, bare), CONVERT, "by layer type")
        other = field(place, {"sliding_attention": inside}, bare)
        yield Variant(f"another type in {place}", other, REFUSED, "without full_attention")
        yield Variant(f"{place} no mapping", field(place, "default"), REFUSED, "must be a mapping")
        llama3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0}
        says = f"{place}.high_freq_factor must be a number above 0, not None"
        yield Variant(f"part of llama3 in {place}", field(place, llama3), REFUSED, says)
        llama3 = llama3 | {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
        yield Variant(f"llama3 in {place}", field(place, llama3), TAKEN)
        yarn = {"rope_type": "yarn", "factor": 4.0}
        says = f"{place}.original_max_position_embeddings must be a number above 0, not None"
        yield Variant(f"part of yarn in {place}", field(place, yarn), REFUSED, says)
        yarn = yarn | {"original_max_position_embeddings": 32}
        yield Variant(f"yarn in {place}", field(place, yarn), TAKEN)
        slow = {**yarn, "beta_fast": 1.0}
        says = f"{place} needs a factor from 1 and beta_slow below beta_fast"
        yield Variant(f"impossible yarn in {place}", field(place, slow), REFUSED, says)
        grown = {**yarn, "attention_factor": 2.0}
        yield Variant(
            f"yarn's factors in {place}", field(place, grown), REFUSED, f"{place} {{'rope"
        )
        for kind in ("linear", "dynamic"):
            scaled = {"rope_type": kind, "factor": 4.0}
            says = f"{place} {{'rope_type': '{kind}'"
            yield Variant(f"{kind} in {place}", field(place, scaled), REFUSED, says)
    old = {"type": "linear", "factor": 2.0}
    yield Variant("old scaling", field("rope_scaling", old), REFUSED, "rope_scaling {'type'")
    section = {"rope_type": "default", "mrope_section": [1, 1]}
    yield Variant("sections", field("rope_parameters", section), REFUSED, "rope_parameters {'rope")


def _layout() -> Iterator[Variant]:
    """Valid ones that SGLang, or Transformers before it, would read otherwise."""
    for name in ("model_type", "markov_head_type", "head_dim", "num_key_value_heads"):
        fitting = dense
        if name == "num_key_value_heads":
            fitting = lambda path: save_drafter(tiny_drafter(num_kv_heads=4), path)  # noqa: E731
        says = f"config.json without {name} at its top level"
        yield Variant(f"no {name}", field(name, ABSENT, fitting), CONVERT, says)

    def nest(name: str, place: str) -> Change:
        def change(raw: dict[str, Any]) -> None:
            raw.setdefault(place, {})[name] = raw.pop(name)

        return after(lambda path: config_of(path, change))

    yield Variant("nested block", nest("block_size", "dflash_config"), TAKEN)
    yield Variant("nested rank", nest("markov_rank", "dflash_config"), CONVERT, "markov_rank at")
    yield Variant("rank elsewhere", nest("markov_rank", "dspark_config"), CONVERT, "markov_rank at")
    yield Variant("block elsewhere", nest("block_size", "dspark_config"), CONVERT, "block_size in")
    row = after(lambda path: config_of(path, lambda raw: raw["dflash_config"].update(ROW)))
    yield Variant("nested anchor", row, CONVERT, "sample_from_anchor below the top level")
    head = nest("enable_confidence_head", "dflash_config")
    yield Variant("nested head", head, CONVERT, "enable_confidence_head below the top level")


def _speculators() -> Iterator[Variant]:
    mark = "has the layout of Speculators"
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    sliding = {**window, "layer_types": ["sliding_attention"] * 2}
    yield Variant("Speculators", speculators(), CONVERT, mark)
    by_type = {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}
    nested = speculators(layers={"rope_parameters": by_type})
    yield Variant("Speculators by type", nested, CONVERT, mark)
    unused = speculators(layers=window)  # its layer_types name full attention
    yield Variant("Speculators, window of no layer", unused, CONVERT, mark)
    for name, layers in (("types", sliding), ("derived", {**window, "layer_types": None})):
        yield Variant(f"Speculators, window, {name}", speculators(layers=layers), CONVERT, mark)
    row = speculators(sample_from_anchor=False)
    yield Variant("Speculators, 1 + N", row, CONVERT, mark)
    for name, changes, says in (
        ("window 0", {"layers": {**sliding, "sliding_window": 0}}, ".sliding_window is 0; of"),
        ("window null", {"layers": {**sliding, "sliding_window": None}}, ".sliding_window is None"),
        ("window off", {"layers": {**sliding, "use_sliding_window": False}}, ".use_sliding_window"),
        ("one type", {"layers": {**sliding, "layer_types": ["full_attention"]}}, ".layer_types is"),
        ("other type", {"layers": {**sliding, "layer_types": ["x", "x"]}}, ".layer_types is ['x'"),
        ("order", {"layers": sliding, "sliding_window_non_causal": 1}, "window_non_causal is 1"),
        ("window at the top", {"sliding_window": 16}, "sliding_window is 16; of the Speculators"),
        ("no rope", {"layers": {"rope_parameters": None}}, "rope_theta is missing"),
        ("yarn", {"layers": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_theta is missing"),
        ("gelu", {"layers": {"hidden_act": "gelu"}}, "hidden_act 'gelu' is not supported"),
        ("biases", {"layers": {"attention_bias": True}}, "attention_bias True is not supported"),
        ("no anchor", {"sample_from_anchor": None}, "sample_from_anchor is None"),
        ("anchor alone", {"sample_from_anchor": False, "block_size": 1}, "block_size is 1; of"),
        ("no mask", {"mask_token_id": -1}, "mask_token_id is -1"),
        ("vocabulary", {"draft_vocab_size": 62}, "draft_vocab_size is 62"),
        ("whole head", {"draft_vocab_size": 32}, "markov_head.markov_w2.weight has shape [61, 8]"),
        ("depth", {"aux_hidden_state_layer_ids": [1, 9]}, "target_layer_ids [8] lie outside"),
        ("quantised", {"quantization_config": {"bits": 8}}, "quantization_config is {'bits': 8}"),
    ):
        yield Variant(f"Speculators, {name}", speculators(**changes), REFUSED, says)
    last = speculators(aux_hidden_state_layer_ids=[1, 4])
    yield Variant(
        "Speculators, last layer", last, UNSERVED, "the output of the target's last layer"
    )


def _values() -> Iterator[Variant]:
    """NaN, infinities and types of weights."""

    def put(name: str, value: float) -> Change:
        def change(found: Tensors) -> None:
            found[name].view(-1)[-1] = value

        return tensors(change)

    for name in (
        "confidence_head.proj.bias",
        "layers.1.mlp.up_proj.weight",
        "markov_head.markov_w1.weight",
        "norm.weight",
    ):
        for value in (float("nan"), float("inf"), float("-inf")):
            says = f"the weight {name} holds NaN or infinite values"
            yield Variant(f"{value} in {name}", put(name, value), REFUSED, says)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        whole = tensors(lambda found, t=dtype: {k: v.to(t) for k, v in found.items()})
        yield Variant(f"stored as {dtype}", whole, TAKEN)
    beyond = tensors(lambda found: {k: v.double() * 1e300 for k, v in found.items()})
    yield Variant("beyond float32", beyond, REFUSED, "holds NaN or infinite values")
    name = "layers.0.self_attn.q_proj.weight"
    for dtype in (torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool):
        codes = tensors(lambda found, n=name, t=dtype: found | {n: found[n].to(t)})
        says = f"the weight {name} is stored as"
        yield Variant(f"codes of {dtype}", codes, REFUSED, says)


def _names() -> Iterator[Variant]:
    """Missing, prefixed and unread weights."""
    for name in ("fc.weight", "layers.1.mlp.down_proj.weight", "markov_head.markov_w2.weight"):
        less = tensors(lambda found, n=name: {k: v for k, v in found.items() if k != n})
        yield Variant(f"without {name}", less, REFUSED, f"lacks the weight {name}")
        turned = tensors(lambda found, n=name: found | {n: found[n].T.contiguous()[:-1]})
        yield Variant(f"{name} of another shape", turned, REFUSED, f"the weight {name} has shape")
    bias = "confidence_head.proj.bias"
    headless = tensors(lambda found: {k: v for k, v in found.items() if k != bias})
    yield Variant("without a bias", headless, REFUSED, "or set enable_confidence_head to false")
    for prefix in (
        "module.",
        "_orig_mod.",
        "module._orig_mod.",
        "model._orig_mod.",
        "model.",
        "x.",
    ):
        named = tensors(lambda found, p=prefix: {f"{p}{k}": v for k, v in found.items()})
        verdict = {"model.": TAKEN, "x.": REFUSED}.get(prefix, CONVERT)
        says = {"model.": "", "x.": "its names are prefixed (x."}.get(prefix, "are prefixed with")
        yield Variant(f"names with {prefix}", named, verdict, says)
    for name in (
        "layers.0.self_attn.q_proj.bias",
        "layers.0.mlp.up_proj.weight_scale",
        "layers.2.input_layernorm.weight",
        "markov_head.gate_proj.weight",
        "candidate_selector.hidden_projection.weight",
        "midlayer.hidden_norm.weight",
    ):
        more = tensors(lambda found, n=name: found | {n: torch.zeros(2, 2)})
        yield Variant(f"with {name}", more, REFUSED, f"nothing reads the weight {name}")
    for name in ("embed_tokens.weight", "lm_head.weight", "t2d", "layers.0.rotary_emb.inv_freq"):
        more = tensors(lambda found, n=name: found | {n: torch.zeros(2, 2)})
        yield Variant(f"with {name}", more, TAKEN)


def _files() -> Iterator[Variant]:
    """Shards, indices, and files next to the drafter's own."""

    def sharded(path: Path, more: dict[str, str] | None = None) -> None:
        found = load_file(path / WEIGHTS)
        (path / WEIGHTS).unlink()
        places = {k: f"m-{i % 2}.safetensors" for i, k in enumerate(found)}
        for file in set(places.values()):
            save_file({k: v for k, v in found.items() if places[k] == file}, path / file)
        (path / INDEX).write_text(json.dumps({"weight_map": places | (more or {})}))

    def stale(path: Path, name: str = WEIGHTS) -> None:
        zeros = {k: torch.zeros(s) for k, s in (("fc.weight", (32, 64)), ("norm.weight", (32,)))}
        save_file(zeros, path / name)

    def cut(path: Path) -> None:
        file = path / WEIGHTS
        file.write_bytes(file.read_bytes()[:-9])

    def text(name: str, content: str) -> Change:
        return after(lambda path: void((path / name).write_text(content)))

    yield Variant("shards", after(sharded), TAKEN)
    yield Variant("shards and a stale file", after(stale, after(sharded)), TAKEN)
    lost = after(lambda path: sharded(path, {"x": "gone.safetensors"}))
    yield Variant("shards and a lost one", lost, REFUSED, "has no gone.safetensors")
    outside = after(lambda path: sharded(path, {"x": "../m-0.safetensors"}))
    yield Variant("a shard elsewhere", outside, REFUSED, "has no ../m-0.safetensors")
    no_index = after(lambda path: (path / INDEX).unlink(), after(stale, after(sharded)))
    yield Variant("stale without an index", no_index, REFUSED, "one weight is stored twice, in")
    beside = after(lambda path: stale(path, "old.safetensors"))
    yield Variant("a stale file beside", beside, REFUSED, "one weight is stored twice, in")
    twice = tensors(lambda found: found | {"model.fc.weight": found["fc.weight"].clone()})
    yield Variant("one name twice", twice, REFUSED, "(fc.weight) and model.safetensors (model.fc")
    both = after(lambda path: stale(path, "consolidated.safetensors"))
    yield Variant("consolidated", both, TAKEN)
    yield Variant("cut off", after(cut), REFUSED, "model.safetensors is truncated or corrupt")
    yield Variant("a pointer", text(WEIGHTS, "version https://git-lfs"), REFUSED, "truncated or")
    none = after(lambda path: (path / WEIGHTS).unlink())
    yield Variant("no weights", none, REFUSED, "has no safetensors file")
    yield Variant("index of nothing", text(INDEX, '{"weight_map": {}}'), REFUSED, "names no file")
    yield Variant("broken index", text(INDEX, "{"), REFUSED, f"{INDEX} cannot be read")
    yield Variant("odd index", text(INDEX, '{"weight_map": []}'), REFUSED, f"{INDEX} cannot be")
    yield Variant("broken JSON", text(CONFIG, '{"architectures": '), REFUSED, "it is not JSON")
    yield Variant("a list", text(CONFIG, "[]"), REFUSED, "is no JSON object")
    unread = after(lambda path: (path / CONFIG).unlink())
    yield Variant("no config", unread, REFUSED, "has no config.json")


def _families() -> Iterator[Variant]:
    """Architectures, and drafters with experts."""
    for name in ("LingDSparkModel", "DSparkDraftModel"):
        yield Variant(name, field("architectures", [name]), TAKEN)
    for names in (["SomeDSparkModel"], ["Qwen3DSparkModel", "DSparkDraftModel"]):
        says = "in config.json is no DSpark drafter"
        yield Variant(f"architectures {names}", field("architectures", names), REFUSED, says)
    for name in ("DSparkMiniMaxDraftModel", "Lfm2DSparkDraftModel"):
        says = "is a family that only SGLang computes"
        yield Variant(name, field("architectures", [name]), SERVED, says)
    last = lambda path: save_drafter(tiny_drafter(target_layer_ids=(0, 3)), path)  # noqa: E731
    yield Variant("the last layer", last, UNSERVED, "reads the output of the target's last layer")

    def experts(path: Path) -> None:
        shape = {"num_experts": 2, "experts_per_token": 1, "moe_intermediate_size": 16}
        save_drafter(tiny_drafter(**shape, window=8), path)

    yield Variant("experts", experts, TAKEN)
    codes = field("expert_format", "fp8", experts)
    yield Variant("experts without scales", codes, REFUSED, "lacks the weight layers.0.mlp.experts")
    unknown = field("expert_format", "int3", experts)
    yield Variant("experts of no format", unknown, REFUSED, "expert format 'int3' is none of")
    fields = field("n_routed_experts", ABSENT, experts)
    yield Variant("experts without a count", fields, REFUSED, "'n_routed_experts' is missing")
