"""Each way in which a drafter can be unfit has one line: what, where, and how to fix it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.drafter.checkpoint import save_drafter
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.drafter.weight_files import stored_tensors
from sglang_dspark.errors import DSparkError
from sglang_dspark.serving.checkpoint import validate_drafter

TARGET = Target(path="target", hidden_size=16, vocab_size=40, num_layers=6)


def config(**changes: Any) -> DrafterConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 40,
        "gamma": 5,
        "target_layer_ids": (0, 2, 5),
        "num_target_layers": 6,
        "mask_token_id": 3,
        "markov_rank": 4,
    }
    return DrafterConfig(**{**sizes, **changes})


def export(path: Path, **changes: Any) -> Path:
    save_drafter(DSparkDrafter(config(**changes)), path)
    return path


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    values = json.loads(file.read_text())
    for name, value in changes.items():
        where = values["dflash_config"] if name in values["dflash_config"] else values
        where[name] = value
    file.write_text(json.dumps(values))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def refused(path: Path, **asked: Any) -> str:
    with pytest.raises(DSparkError) as raised:
        validate_drafter(path, TARGET, **asked)
    message = str(raised.value)
    assert str(path) in message
    assert "\n" not in message
    assert ";" in message, "the part after the semicolon says how to fix it"
    return message


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("confidence", [True, False])
def test_what_our_trainer_writes_is_accepted(tmp_path: Path, head: str, confidence: bool) -> None:
    path = export(tmp_path / "d", markov_head_type=head, confidence_head=confidence)
    validate_drafter(path, TARGET)
    validate_drafter(path, TARGET, block_size=5, needs_confidence=confidence)
    validate_drafter(path, TARGET, block_size=1)
    validate_drafter(path, TARGET, block_size=3, draft_tokens=4)
    validate_drafter(path, TARGET, draft_tokens=6)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, but the target target has 16"),
        ({"vocab_size": 48}, "vocab_size is 48, but the target target has 40"),
        (
            {"num_target_layers": 8},
            "num_target_layers is 8, but the target target has 6 layers",
        ),
    ],
)
def test_a_drafter_of_another_target(tmp_path: Path, sizes: dict[str, int], says: str) -> None:
    message = refused(export(tmp_path / "d", **sizes))
    assert says in message
    assert "use a drafter trained for this target" in message


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("target_layer_ids", [0, 6], "target_layer_ids [6] lie outside the target's layers 0..5"),
        ("target_layer_ids", [-1, 2], "target_layer_ids: -1 is no integer from 0 to 1023; fetch"),
        ("target_layer_ids", [], "must be a list of integers, not []"),
        ("target_layer_ids", ["a"], "must be a list of integers"),
        ("mask_token_id", 40, "mask_token_id 40 lies outside the vocabulary of 40; use"),
        ("mask_token_id", -1, "mask_token_id in config.json must be an integer >= 0"),
        ("mask_token_id", None, "mask_token_id in config.json must be an integer"),
        ("block_size", "5", "block_size in config.json must be an integer >= 1, not '5'"),
        ("markov_rank", 0, "markov_rank in config.json must be an integer >= 1"),
        ("markov_head_type", "linear", "markov_head_type 'linear' in config.json is unknown"),
        ("architectures", ["LlamaForCausalLM"], "is no DSpark drafter"),
        ("architectures", None, "is no DSpark drafter"),
    ],
)
def test_a_config_field_that_does_not_fit(
    tmp_path: Path, field: str, value: Any, says: str
) -> None:
    path = export(tmp_path / "d")
    edit_config(path, **{field: value})
    assert says in refused(path)


def test_the_last_layer_of_a_target_that_does_not_hand_it_out(tmp_path: Path) -> None:
    path = export(tmp_path / "d", target_layer_ids=(0, 5))
    llama = dataclasses.replace(TARGET, architecture="LlamaForCausalLM")
    with pytest.raises(DSparkError, match=r"last layer \(5\), .* for LlamaForCausalLM; use a"):
        validate_drafter(path, llama)
    validate_drafter(path, dataclasses.replace(TARGET, architecture="Gemma3ForCausalLM"))
    validate_drafter(export(tmp_path / "e", target_layer_ids=(0, 4)), llama)


@pytest.mark.parametrize("gamma", [6, 0, -2])
def test_gamma_outside_the_trained_block(tmp_path: Path, gamma: int) -> None:
    message = refused(export(tmp_path / "d"), block_size=gamma)
    assert f"trained for blocks of 5 tokens, but gamma {gamma} was asked for" in message
    assert "--speculative-dspark-block-size (gamma) to 1..5" in message


@pytest.mark.parametrize(
    ("asked", "wanted"), [({"draft_tokens": 4}, 6), ({"block_size": 3, "draft_tokens": 6}, 4)]
)
def test_draft_tokens_that_sglang_would_refuse(
    tmp_path: Path, asked: dict[str, int], wanted: int
) -> None:
    message = refused(export(tmp_path / "d"), **asked)
    assert (
        f"--speculative-num-draft-tokens must be {wanted}, not {asked['draft_tokens']}" in message
    )
    assert "set --speculative-dspark-block-size to 1..5" in message


def test_confidence_weights_missing_though_enabled(tmp_path: Path) -> None:
    path = export(tmp_path / "d")
    edit_weights(path, lambda tensors: tensors.pop("confidence_head.proj.weight"))
    message = refused(path)
    assert "lacks the weight confidence_head.proj.weight [1, 20]" in message
    assert "set enable_confidence_head to false" in message


def test_a_verify_mode_that_needs_the_confidence_head(tmp_path: Path) -> None:
    path = export(tmp_path / "d", confidence_head=False)
    validate_drafter(path, TARGET)
    assert "SGLANG_RAGGED_VERIFY_MODE needs" in refused(path, needs_confidence=True)


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.1.mlp.down_proj.weight", "markov_head.markov_w2.weight"]
)
def test_a_missing_weight(tmp_path: Path, name: str) -> None:
    path = export(tmp_path / "d")
    edit_weights(path, lambda tensors: tensors.pop(name))
    assert f"lacks the weight {name}" in refused(path)


def test_a_weight_of_another_shape(tmp_path: Path) -> None:
    path = export(tmp_path / "d")
    edit_config(path, target_layer_ids=[0, 2])
    message = refused(path)
    assert "fc.weight has shape [16, 48], but config.json implies [16, 32]" in message


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_weights(tmp_path: Path, keep: int) -> None:
    path = export(tmp_path / "d")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors is truncated or corrupt" in refused(path)


def test_weights_that_are_something_else(tmp_path: Path) -> None:
    path = export(tmp_path / "d")
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "truncated or corrupt" in refused(path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    path = export(tmp_path / "d")
    (path / "model.safetensors").unlink()
    assert "has no safetensors file" in refused(path)


def test_a_drafter_whose_weights_are_not_here_yet(tmp_path: Path) -> None:
    path = export(tmp_path / "d")
    (path / "model.safetensors").unlink()
    validate_drafter(path, TARGET, weights=False)
    assert "trained for blocks of 5" in refused(path, block_size=9, weights=False)


def test_a_missing_shard(tmp_path: Path) -> None:
    path = export(tmp_path / "d")
    index = {"weight_map": {"fc.weight": "model.safetensors", "x": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "has no model-2.safetensors" in refused(path)


def test_an_index_that_is_broken(tmp_path: Path) -> None:
    path = export(tmp_path / "d")
    (path / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json cannot be read" in refused(path)


def test_no_config_no_directory_no_json(tmp_path: Path) -> None:
    path = export(tmp_path / "d")
    (path / "config.json").write_text('{"architectures": ')
    assert "config.json cannot be read" in refused(path)
    (path / "config.json").write_text("[]")
    assert "is no JSON object" in refused(path)
    (path / "config.json").unlink()
    assert "has no config.json" in refused(path)
    assert "is not a directory" in refused(tmp_path / "gone")


def test_names_with_a_model_prefix_are_the_same(tmp_path: Path) -> None:
    path = export(tmp_path / "d")
    tensors = load_file(path / "model.safetensors")
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(prefixed, path / "model.safetensors", {"format": "pt"})
    validate_drafter(path, TARGET)
    assert stored_tensors(path)["fc.weight"].shape == (16, 48)


def test_other_families_are_checked_for_whole_files_only(tmp_path: Path) -> None:
    path = export(tmp_path / "d", hidden_size=32)
    edit_config(path, architectures=["DSparkMiniMaxDraftModel"])
    validate_drafter(path, TARGET)
    (path / "model.safetensors").write_bytes(b"1234")
    assert "truncated or corrupt" in refused(path)
