import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_dspark.drafter import DrafterConfig, load_drafter, save_drafter
from sglang_dspark.drafter.checkpoint import own_tensors, stored_bytes, write_checkpoint
from sglang_dspark.errors import DSparkError
from sglang_dspark.quantisation.checkpoint import bytes_of, expert_names, quantise_tensors
from tests.drafter.helpers import tiny_config, tiny_drafter


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_round_trip_is_bit_exact(tmp_path, head):
    drafter = tiny_drafter(markov_head_type=head)
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path, drafter.embed_weight, drafter.head_weight)
    assert again.config == drafter.config
    for a, b in zip(drafter.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not list(tmp_path.glob("*.tmp"))


def test_names_are_those_of_upstream(tmp_path):
    save_drafter(tiny_drafter(), tmp_path)
    from safetensors import safe_open

    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        names = set(file.keys())
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} <= names
    assert {"markov_head.markov_w1.weight", "confidence_head.proj.bias"} <= names
    assert "layers.1.self_attn.q_norm.weight" in names
    assert not any(n.startswith("backbone.") for n in names)


def test_truncated_file_is_one_clear_line(tmp_path):
    drafter = tiny_drafter()
    save_drafter(drafter, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DSparkError, match="is truncated or corrupt") as error:
        load_drafter(tmp_path, drafter.embed_weight, drafter.head_weight)
    assert "\n" not in str(error.value)


def test_wrong_target_missing_weight_and_bad_config(tmp_path):
    drafter = tiny_drafter()
    save_drafter(drafter, tmp_path)
    with pytest.raises(DSparkError, match=r"vocab_size is 61, but the target .* has 50"):
        load_drafter(tmp_path, torch.zeros(50, 32), torch.zeros(50, 32))
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DSparkError, match=r"lacks the weight layers\.2"):
        load_drafter(tmp_path, drafter.embed_weight, drafter.head_weight)
    del raw["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DSparkError, match="block_size"):
        DrafterConfig.from_dir(tmp_path)
    with pytest.raises(DSparkError, match="no drafter"):
        DrafterConfig.from_dir(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 0}, "gamma"),
        ({"markov_rank": 0}, "markov_rank"),
        ({"markov_head_type": "lstm"}, "lstm"),
        ({"num_heads": 3}, "key/value"),
        ({"target_layer_ids": (0, 4)}, "outside"),
        ({"mask_token_id": 61}, "mask_token_id"),
    ],
)
def test_config_is_validated(change, message):
    with pytest.raises(DSparkError, match=message):
        tiny_config(**change)


@pytest.mark.parametrize("form", ["bf16", "fp8", "mxfp4", "nvfp4"])
def test_bytes_are_counted_by_format(tmp_path: Path, form: str) -> None:
    """Together they are the file but for its header; experts of a format are codes and scales."""
    drafter = tiny_drafter(num_experts=2, experts_per_token=1, moe_intermediate_size=64,
                           num_shared_experts=1, num_layers=1)  # fmt: skip
    tensors = own_tensors(drafter, torch.bfloat16)
    experts = expert_names(tensors)
    config = replace(drafter.config, expert_format=form)
    stored = tensors if form == "bf16" else quantise_tensors(tensors, form)
    write_checkpoint(tmp_path, stored, config.to_json())
    found = stored_bytes(tmp_path)
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert sum(found.values()) == (tmp_path / "model.safetensors").stat().st_size - 8 - header
    assert ("bf16 experts" in found) is False
    if form != "bf16":
        parts = [n for n in stored if n.startswith(tuple(experts))]
        assert found[f"{form} experts"] == bytes_of({n: stored[n] for n in parts})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_configuration_has_the_type_of_the_weights(tmp_path, dtype):
    """A server that chooses its type by the file must not take float16 for bfloat16 weights."""
    save_drafter(tiny_drafter(), tmp_path, dtype)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["dtype"] == str(dtype).removeprefix("torch.")
    # Codes of experts and a few float32 biases do not decide it.
    mixed = {
        "codes": torch.zeros(64, 64, dtype=torch.float8_e4m3fn),
        "weight": torch.zeros(8, 8, dtype=dtype),
        "bias": torch.zeros(2),
        "another bias": torch.zeros(2),
        "token map": torch.zeros(64, 64, dtype=torch.int64),
    }
    write_checkpoint(tmp_path, mixed, raw | {"dtype": "float64"})
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == raw["dtype"]
    write_checkpoint(tmp_path, {"codes": mixed["codes"]}, raw)
    assert json.loads((tmp_path / "config.json").read_text()) == raw


def test_the_shipped_drafters_say_their_type():
    for file in sorted((Path(__file__).resolve().parents[2] / "drafters").glob("*/config.json")):
        assert json.loads(file.read_text())["dtype"] == "bfloat16", file
