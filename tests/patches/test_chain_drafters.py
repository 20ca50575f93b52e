"""Describe drafters that run once a token to SGLang's DSPARK, and refuse those that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("sglang")

from sglang_dspark.backends import drafter_check
from sglang_dspark.backends.cpu.chain_draft import ChainModel
from sglang_dspark.backends.cpu.weight_formats import dense
from sglang_dspark.backends.cuda import chain_model
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.drafter.weight_files import read_tensors
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.chain.served import EAGLE3, MTP
from sglang_dspark.families.eagle3.checkpoint import save_eagle3
from sglang_dspark.families.mtp.checkpoint import save_mtp
from sglang_dspark.patches.step import chain_drafters
from sglang_dspark.serving import weight_updates
from tests.families.helpers import LAYERS, WIDTH, random_drafter

VOCAB, POSITIONS = 40, 8192
FITS = Target("target", WIDTH, VOCAB, 3, "LlamaForCausalLM")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
USUAL = {
    "device": "cpu",
    "enable_unified_memory": False,
    "speculative_draft_window_size": None,
    "speculative_draft_attention_backend": None,
    "lora_paths": None,
    "tp_size": 1,
    "model_path": "target",
    "load_format": "auto",
    "speculative_draft_load_format": None,
}
SAVE: dict[str, Callable[..., None]] = {"eagle3": save_eagle3, "mtp": save_mtp}


def saved(folder: Path, kind: str) -> Path:
    SAVE[kind](random_drafter(kind, VOCAB, torch.arange(0, VOCAB, 2)), folder)
    return folder


def checked(
    path: Path, monkeypatch: pytest.MonkeyPatch, target: Target = FITS, **arguments: Any
) -> None:
    """Check the drafter as a start does."""
    monkeypatch.setattr(drafter_check, "_target", lambda *_: target)
    chosen: list[Any] = []
    monkeypatch.setattr(drafter_check, "_choose_mode", lambda *given: chosen.append(given))
    # Obstacles of any drafter are tested in tests/backends/cuda/test_features.py.
    monkeypatch.setattr(
        drafter_check, "obstacle", lambda _, args: "lora_paths" if args.lora_paths else None
    )
    model = SimpleNamespace(context_len=POSITIONS)
    monkeypatch.setattr(drafter_check.upstream, "model_config_of", lambda _: model, raising=False)
    args = USUAL | {"speculative_draft_model_path": str(path)} | arguments
    drafter_check._check(None, SimpleNamespace(**args))
    assert chosen, "the mode is chosen before models load"


def never(**_: Any) -> Any:
    pytest.fail("upstream's own reader must not see a chain drafter")


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_chain_drafter_is_described_as_a_block(tmp_path: Path, kind: str) -> None:
    raw = random_drafter(kind, VOCAB).config.to_json()
    for given in (raw, SimpleNamespace(to_dict=lambda: raw)):
        made = chain_drafters.chain_config(never, draft_hf_config=given)
        assert made.gamma == raw["gamma"]
        assert made.require_markov()
        assert made.target_layer_ids == (list(LAYERS) if kind == "eagle3" else None)
    made = chain_drafters.chain_config(never, draft_hf_config=raw | {"gamma": None})
    assert made.gamma == 5
    other = {"architectures": ["Qwen3DSparkModel"]}
    assert chain_drafters.chain_config(lambda **given: given, draft_hf_config=other) == {
        "draft_hf_config": other
    }


@pytest.mark.parametrize("mode", ["static", "off"])
def test_a_gpu_whose_steps_are_sglangs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    choice = drafter_check.mode.Choice(False, f"schedule.mode is {mode}")
    monkeypatch.setattr(drafter_check.mode, "choice", lambda: choice)
    with pytest.raises(DSparkError, match=f"schedules: schedule.mode is {mode}; --spec"):
        checked(saved(tmp_path, "mtp"), monkeypatch, device="cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("algorithm", "ours"), [("DSPARK", True), ("EAGLE3", False)])
def test_our_class_is_taken_by_dspark_alone(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, ours: bool, device: str
) -> None:
    monkeypatch.setattr(chain_drafters, "active_device", lambda: device)
    model = ChainModel if device == "cpu" else chain_model.ChainModel
    spec = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr(chain_drafters.upstream, "get_spec", lambda: spec, raising=False)
    for name in (EAGLE3, MTP, "LlamaForCausalLM"):
        registry = SimpleNamespace(models={name: "theirs"})
        chain_drafters.use_chain_model(registry, name)
        assert (registry.models[name] is model) == (ours and name != "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "dspark", "named", "layers"),
    [
        (MTP, True, None, None),
        (MTP, False, None, [5]),
        (EAGLE3, True, [3], [5]),
        (EAGLE3, True, None, [1, 15, 28]),
        ("Qwen3DSparkModel", True, None, [5]),
    ],
)
def test_the_target_returns_what_the_drafter_reads(
    architecture: str, dspark: bool, named: list[int] | None, layers: list[int] | None
) -> None:
    raw = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": named}}
    drafter = SimpleNamespace(architectures=[architecture], to_dict=lambda: raw)
    config = SimpleNamespace(
        is_dspark=dspark,
        draft_model_config=SimpleNamespace(hf_config=drafter),
        dflash_use_aux_hidden_state=True,
        dflash_target_layer_ids=[5],
    )
    target = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=32))
    assert chain_drafters.choose_features(config, model_config=target) is config
    assert config.dflash_target_layer_ids == layers
    assert config.dflash_use_aux_hidden_state == (layers is not None)
    none = SimpleNamespace(is_dspark=True, draft_model_config=None)
    assert chain_drafters.choose_features(none, model_config=target) is none


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize(
    ("arguments", "target", "says"),
    [
        ({}, FITS, None),
        ({"device": "cuda"}, FITS, None),
        ({"device": "cuda:1"}, FITS, None),
        ({"device": "xpu"}, FITS, "the device is xpu; --speculative-algorithm EAGLE"),
        (
            {"device": "cuda", "speculative_draft_window_size": 9},
            FITS,
            "remove --speculative-draft",
        ),
        (
            {"device": "cuda", "speculative_draft_attention_backend": "trtllm_mha"},
            FITS,
            "set another --speculative-draft-attention",
        ),
        ({"device": "cuda", "enable_unified_memory": True}, FITS, "remove --enable-unified"),
        (
            {"device": "cuda", "tp_size": 2},
            FITS,
            "on one rank alone; --speculative-algorithm EAGLE",
        ),
        ({"device": "cuda", "lora_paths": ["a"]}, FITS, "where it schedules: lora_paths"),
        ({"tp_size": 2}, FITS, "on one rank alone; --speculative-algorithm EAGLE"),
        ({"load_format": "dummy"}, FITS, "set --speculative-draft-load-format auto"),
        ({"speculative_draft_load_format": "dummy"}, FITS, "makes up none"),
        ({"load_format": "dummy", "speculative_draft_load_format": "auto"}, FITS, None),
        ({}, Target("target", 2 * WIDTH, VOCAB, 3, ""), "hidden_size is 64"),
        ({}, Target("target", WIDTH, VOCAB + 1, 3, ""), "vocab_size is 40"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    arguments: dict[str, Any],
    target: Target,
    says: str | None,
) -> None:
    path = saved(tmp_path, kind)
    if says is None:
        checked(path, monkeypatch, target, **arguments)
        return
    with pytest.raises(DSparkError, match=says) as told:
        checked(path, monkeypatch, target, **arguments)
    assert str(path) in str(told.value)


@pytest.mark.parametrize(
    ("layers", "says"), [(1, "reads layer 1 of the target, which has 1"), (2, "last layer")]
)
def test_layers_that_the_target_does_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, says: str
) -> None:
    path = saved(tmp_path, "eagle3")
    target = Target("target", WIDTH, VOCAB, layers, "LlamaForCausalLM" if layers == 2 else "")
    with pytest.raises(DSparkError, match=says):
        checked(path, monkeypatch, target)


def test_a_damaged_file_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = saved(tmp_path, "eagle3") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DSparkError, match="truncated or corrupt"):
        checked(tmp_path, monkeypatch)


@pytest.mark.parametrize(("kind", "architecture"), [("eagle3", EAGLE3), ("mtp", MTP)])
def test_new_weights_replace_all_that_was_copied(
    tmp_path: Path, kind: str, architecture: str
) -> None:
    """The drafter's own, a part of them, and the rows of the target's LM head that MTP copies."""
    first, second = (random_drafter(kind, VOCAB, torch.arange(4, 8), seed=s) for s in (1, 2))
    raw = first.config.to_json() | {"eagle_config": None}  # names no layers
    made = SimpleNamespace(architectures=[architecture], to_dict=lambda: raw)
    if kind == "eagle3":  # three layers, as of a drafter that names none
        for drafter in (first, second):
            drafter.fc = torch.nn.Linear(3 * WIDTH, WIDTH, bias=False)
    model = ChainModel(made)
    for name, module in (("first", first), ("second", second)):
        SAVE[kind](module, tmp_path / name, torch.bfloat16)
    head = torch.nn.Embedding(VOCAB + 2, WIDTH)  # padded, as SGLang's is
    model.load_weights(read_tensors(tmp_path / "first").items())
    model.attach_shared_modules(embed_tokens=head, lm_head=head)
    stored = {
        name.replace("midlayer.", "model.layers.0."): tensor
        for name, tensor in read_tensors(tmp_path / "second").items()
    }
    model.load_weights(stored.items())
    assert model.drafter is not None
    assert torch.equal(model.drafter.embed_weight, head.weight)
    assert model.drafter.draft_ids.tolist() == [4, 5, 6, 7]
    given = dict(second.named_parameters())
    for name, weight in model.drafter.named_parameters():
        assert torch.equal(dense(weight), given[name].bfloat16().float()), name
    part = next(name for name in stored if name.endswith("mlp.gate_proj.weight"))
    model.load_weights([(part, torch.ones_like(stored[part]))])
    assert model.drafter.mlp.gate_proj.weight.eq(1).all()
    up = model.drafter.mlp.up_proj.weight
    assert torch.equal(dense(up), given["mlp.up_proj.weight"].bfloat16().float())
    with torch.no_grad():
        head.weight.add_(1.0)
    weight_updates.renew_copies(model)
    assert torch.equal(model.drafter.embed_weight, head.weight)
    if kind == "mtp":
        assert torch.equal(model.drafter.head_weight, head.weight[4:8])


def test_one_layer_of_features_is_refused_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's class takes features as wide as the embedding for its own output."""
    drafter = random_drafter("eagle3", VOCAB)
    object.__setattr__(drafter.config, "target_layer_ids", (1,))
    drafter.fc = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    save_eagle3(drafter, tmp_path)
    checked(tmp_path, monkeypatch)
    with pytest.raises(DSparkError, match="reads one layer of the target"):
        checked(tmp_path, monkeypatch, device="cuda")


def test_a_target_without_features_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eagle3 reads features of layers; MTP reads the last hidden state of any target."""
    target = Target("target", WIDTH, VOCAB, 3, "Gemma2ForCausalLM")
    with pytest.raises(DSparkError, match=r"Gemma2ForCausalLM .* has neither a hook for them nor"):
        checked(saved(tmp_path / "eagle3", "eagle3"), monkeypatch, target)
    checked(saved(tmp_path / "mtp", "mtp"), monkeypatch, target)


@pytest.mark.parametrize("name", ["fc_norm.weight", "input_norm.weight", "aux_norm_mid.weight"])
def test_norms_that_nothing_reads_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = saved(tmp_path, "eagle3") / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(WIDTH)}, file)
    with pytest.raises(DSparkError, match=f"nothing reads the weight {name}"):
        checked(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "changed", "says"),
    [
        ("eagle3", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("mtp", {"attention_bias": True}, "attention_bias True is not supported"),
        ("eagle3", {"norm_output": True}, "norm_output True is not supported"),
        ("eagle3", {"eagle_config": {"norm_before_fc": True}}, "norm_before_fc True"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ("mtp", {"sliding_window": 16}, "sliding_window 16"),
        ("mtp", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("eagle3", {"eagle_config": {LAYER_IDS: [1, 1]}}, "once each and in ascending order"),
        ("eagle3", {"eagle_config": {LAYER_IDS: [1, 0]}}, "once each and in ascending order"),
        ("eagle3", {"use_aux_norm": True}, "use_aux_norm True"),
        ("eagle3", {"target_hidden_size": 128}, "target_hidden_size 128 beside"),
        ("mtp", {"max_position_embeddings": 2048}, "set --context-length 2048"),
        ("eagle3", {"gamma": None, "target_hidden_size": WIDTH}, None),
    ],
)
def test_what_would_be_misread_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    changed: dict[str, Any],
    says: str | None,
) -> None:
    file = saved(tmp_path, kind) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    if says is None:
        checked(tmp_path, monkeypatch)
        return
    with pytest.raises(DSparkError, match=says):
        checked(tmp_path, monkeypatch)


def test_weights_that_are_not_here_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Hub id the config alone is fetched before the start."""
    for kind in ("eagle3", "mtp"):
        folder = saved(tmp_path / kind, kind)
        (folder / "model.safetensors").unlink()
        monkeypatch.setattr(drafter_check, "_fetch_config", lambda *_, folder=folder: folder)
        checked(Path("owner/drafter"), monkeypatch)
        with pytest.raises(DSparkError, match="no safetensors file"):
            checked(folder, monkeypatch)
