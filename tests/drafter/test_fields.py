"""Fields of a drafter's config.json: the same lines for the drafter's own reader and a server's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sglang_dspark.drafter.checkpoint import built, without_memory
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.fields import Fields
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.drafter.weight_files import stored_tensors
from sglang_dspark.errors import DSparkError
from sglang_dspark.serving.checkpoint import validate_drafter
from tests.drafter.helpers import tiny_config

TARGET = Target("target", 32, 50, 4)


def said(read: Any) -> str:
    with pytest.raises(DSparkError) as raised:
        read()
    return str(raised.value)


@pytest.mark.parametrize("value", ["5", 5.0, True, None, 0, [5]])
@pytest.mark.parametrize("name", ["block_size", "markov_rank", "hidden_size", "vocab_size"])
def test_what_is_no_integer_is_named(tmp_path: Path, name: str, value: object) -> None:
    raw = tiny_config().to_json() | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    own = said(lambda: DrafterConfig.from_dir(tmp_path))
    assert own == said(lambda: validate_drafter(tmp_path, TARGET, weights=False))
    assert f"{name} in config.json must be an integer >= 1, not {value!r}; fetch or" in own


@pytest.mark.parametrize("ids", [None, [], [1.0], [True], "12", {"0": 1}])
def test_layers_are_a_list_of_integers(tmp_path: Path, ids: object) -> None:
    raw = tiny_config().to_json()
    raw["dflash_config"]["target_layer_ids"] = ids
    (tmp_path / "config.json").write_text(json.dumps(raw))
    own = said(lambda: DrafterConfig.from_dir(tmp_path))
    assert own == said(lambda: validate_drafter(tmp_path, TARGET, weights=False))
    assert f"target_layer_ids in config.json must be a list of integers, not {ids!r}" in own


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    raw = tiny_config().to_json()
    del raw["markov_rank"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    own = said(lambda: DrafterConfig.from_dir(tmp_path))
    assert own == said(lambda: validate_drafter(tmp_path, TARGET, weights=False))
    assert own == f"{tmp_path}/config.json: 'markov_rank' is missing; is this a DSpark drafter?"


def test_a_nested_field_counts_like_one_at_the_top() -> None:
    fields = Fields({"block_size": None, "dflash_config": {"block_size": 4, "x": 1}}, "here")
    assert (fields.integer("block_size"), fields.get("x")) == (4, 1)
    assert "dspark_config in config.json must be a mapping, not [5]" in said(
        lambda: Fields({"dspark_config": [5]}, "here")
    )


def test_a_field_with_two_values_is_refused() -> None:
    """SGLang reads the block size from `dflash_config` and the Markov rank at the top."""
    raw = {"block_size": 3, "dflash_config": {"block_size": 3}, "dspark_config": {"block_size": 5}}
    assert "block_size in config.json is 3 in one place and 5 in dspark_config; remove" in said(
        lambda: Fields(raw, "here")
    )


def test_a_head_type_is_read_in_small_letters() -> None:
    assert Fields({}, "here").markov_head() == "vanilla"
    assert Fields({"markov_head_type": "RNN"}, "here").markov_head() == "rnn"
    assert "markov_head_type 'none' in config.json is unknown" in said(
        Fields({"markov_head_type": None}, "here").markov_head
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": [1e-6]},
        {"rope_theta": float("nan")},
        {"intermediate_size": 1 << 40},
        {"num_hidden_layers": 100_000},
        {"head_dim": 1.5},
        {"dflash_config": {"target_layer_ids": [1, 10**30]}},
    ],
)
def test_what_no_drafter_can_have_is_refused_in_one_line(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_json() | changed))
    line = said(lambda: DrafterConfig.from_dir(tmp_path))
    assert str(tmp_path) in line
    assert line.isprintable()
    assert len(line) < 500


def test_no_memory_is_taken_for_sizes_that_the_weights_do_not_have(tmp_path: Path) -> None:
    devices = []

    def make() -> nn.Module:
        devices.append(torch.empty(1).device.type)
        return nn.Linear(4, 4)

    def opened(name: str, tensors: dict[str, torch.Tensor]) -> nn.Module:
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return built(make, stored_tensors(tmp_path / name), str, tmp_path)

    assert "the weight weight has shape [2, 4], but config.json implies [4, 4]" in said(
        lambda: opened("small", {"weight": torch.ones(2, 4)})
    )
    assert devices == ["meta"]
    tensors = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    filled = opened("whole", tensors).state_dict()
    assert all(torch.equal(filled[name], tensors[name]) for name in tensors)


def test_weights_without_memory_are_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.init, "_no_grad_normal_", None)
    monkeypatch.setattr(nn.init, "_no_grad_uniform_", None)

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 3), nn.LayerNorm(3))

    with pytest.raises(TypeError):
        make()
    made = without_memory(make, tmp_path).state_dict()
    shapes = [(*weight.shape, weight.device.type) for weight in made.values()]
    assert shapes == [(4, 2, "meta"), (3, 2, "meta"), *[(3, "meta")] * 3]
