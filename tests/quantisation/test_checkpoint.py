"""Quantised checkpoints: what the file holds, that they load as the codes say, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.drafter import load_drafter, save_drafter
from sglang_dspark.drafter.checkpoint import own_shapes
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.weight_files import read_tensors
from sglang_dspark.errors import DSparkError
from sglang_dspark.quantisation import FORMATS, dequantise, quantise
from sglang_dspark.quantisation.checkpoint import expert_names, quantise_tensors, restore_tensors
from tests.drafter.helpers import tiny_drafter

EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "moe_intermediate_size": 64,
    "num_shared_experts": 1,
    "residual_streams": 2,
}


def run(*arguments: object) -> None:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_drafter(tiny_drafter(**EXPERTS), tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_quantised_drafter_loads_with_the_weights_its_codes_stand_for(
    source: Path, tmp_path: Path, name: str
) -> None:
    run(source, "--format", name, "--out", tmp_path / "out")
    drafter = tiny_drafter(**EXPERTS)
    found = load_drafter(tmp_path / "out", drafter.embed_weight, drafter.head_weight)
    assert found.config.expert_format == name
    quantised = 0
    for key, weight in drafter.state_dict().items():
        own = found.state_dict()[key]
        if key.removeprefix("backbone.") in expert_names(read_tensors(source)):
            assert torch.equal(own, dequantise(quantise(weight, name))), key
            assert (own - weight).norm() < 0.2 * weight.norm()
            quantised += 1
        else:
            assert torch.equal(own, weight), key
    assert quantised == 2 * 6
    stored = read_tensors(tmp_path / "out")
    expected = own_shapes(DrafterConfig.from_dir(tmp_path / "out"), tmp_path)
    assert expected == {key: tuple(tensor.shape) for key, tensor in stored.items()}
    record = json.loads((tmp_path / "out" / "quantised.json").read_text())
    assert record["format"] == name
    assert len(record["relative_error"]) == 6
    assert len(record["source_sha256"]) == 64


def test_four_bits_are_four_bits(source: Path, tmp_path: Path) -> None:
    run(source, "--format", "mxfp4", "--out", tmp_path / "out")
    before, after = load_file(source / "model.safetensors"), read_tensors(tmp_path / "out")
    key = "layers.0.mlp.experts.up_proj"
    assert after[key].numel() * 8 == before[key].numel() * 4
    assert after[key + "_scale"].shape == (4, 64, 1)
    assert set(before) < set(after)


def test_exported_again_it_is_whole(source: Path, tmp_path: Path) -> None:
    run(source, "--format", "fp8", "--out", tmp_path / "out")
    drafter = tiny_drafter()
    found = load_drafter(tmp_path / "out", drafter.embed_weight, drafter.head_weight)
    save_drafter(found, tmp_path / "again")
    assert DrafterConfig.from_dir(tmp_path / "again").expert_format == "bf16"
    again = load_drafter(tmp_path / "again", drafter.embed_weight, drafter.head_weight)
    for key, weight in found.state_dict().items():
        assert torch.equal(weight, again.state_dict()[key])


def test_bad_input_is_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DSparkError, match=r"int3'? is none of"):
        run(source, "--format", "int3", "--out", out)
    with pytest.raises(DSparkError, match="the drafter itself"):
        run(source, "--out", source)
    run(source, "--out", out)
    with pytest.raises(DSparkError, match="has fp8 experts already"):
        run(out, "--format", "mxfp4", "--out", tmp_path / "other")
    save_drafter(tiny_drafter(), tmp_path / "dense")
    with pytest.raises(DSparkError, match="is a dense drafter"):
        run(tmp_path / "dense", "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_broken_weights_and_scales_are_named(source: Path) -> None:
    tensors = read_tensors(source)
    key = "layers.1.mlp.experts.down_proj"
    broken = tensors[key].clone()
    broken[0, 0, 0] = float("nan")
    with pytest.raises(DSparkError, match=rf"{key}: .*1 of \d+ weights are NaN"):
        quantise_tensors(tensors | {key: broken}, "fp8")
    quantised = quantise_tensors(tensors, "fp8")
    with pytest.raises(DSparkError, match=f"{key}: fp8: scales are missing"):
        restore_tensors({k: t for k, t in quantised.items() if k != key + "_scale"}, "fp8")
    wrong = quantised[key + "_scale"][:, :, :0]
    with pytest.raises(DSparkError, match=f"{key}: fp8: scales are .*other weights"):
        restore_tensors(quantised | {key + "_scale": wrong}, "fp8")
    with pytest.raises(DSparkError, match="no expert weights"):
        quantise_tensors({"norm.weight": torch.ones(3)}, "fp8")


def test_an_unknown_format_in_a_file_is_refused(source: Path) -> None:
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"expert_format": "int3"}))
    with pytest.raises(DSparkError, match=r"int3'? is none of"):
        DrafterConfig.from_dir(source)
