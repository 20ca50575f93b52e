"""A target made deeper: bit by bit the same hidden states and logits, at several times the cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sglang_dspark.errors import DSparkError
from sglang_dspark.models.drafters import shipped_drafter_path
from sglang_dspark.models.padded_target import ensure_deeper, ensure_fitted


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sglang-dspark"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "provenance.json").write_text("{}")
    return tmp_path / "target"


def read(path: Path) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Logits, and the hidden states in front of each layer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        answer = model(torch.arange(20)[None], output_hidden_states=True)
    return answer.logits, answer.hidden_states


@pytest.mark.parametrize("times", [1.1, 4.0])
def test_nothing_changes_but_the_cost(target: Path, times: float) -> None:
    deeper = ensure_deeper(target, times)
    logits, states = read(deeper)
    wanted, before = read(target)
    assert torch.equal(logits, wanted)
    for state, own in zip(states[:3], before[:3], strict=True):
        assert torch.equal(state, own)
    record = json.loads((deeper / "deeper.json").read_text())
    assert record["source"] == "target"
    assert sum(record["layers"]) == len(states) - 1
    assert not (deeper / "provenance.json").exists()  # another model's


def test_a_pass_reads_as_many_times_the_weights(target: Path) -> None:
    def cost(path: Path) -> int:
        model = AutoModelForCausalLM.from_pretrained(path)
        return sum(parameter.numel() for parameter in model.parameters())

    own, layer = cost(target), sum(p.numel() for p in _layer(target))
    assert cost(ensure_deeper(target, 4.0)) == pytest.approx(4 * own, abs=layer)


def _layer(path: Path) -> list[torch.Tensor]:
    return list(AutoModelForCausalLM.from_pretrained(path).model.layers[0].parameters())


def test_added_layers_compute(target: Path) -> None:
    """All but the projections into the residual stream hold the target's own numbers."""
    deeper = AutoModelForCausalLM.from_pretrained(ensure_deeper(target, 4.0))
    for number, layer in enumerate(deeper.model.layers):
        last = (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)
        assert all(bool(weight.any()) == (number < 3) for weight in last)
        assert layer.mlp.gate_proj.weight.abs().min() > 0
        assert layer.self_attn.v_proj.weight.abs().min() > 0


def test_built_once(target: Path) -> None:
    first = ensure_deeper(target, 2.0)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert ensure_deeper(target, 2.0) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert ensure_deeper(target, 3.0) != first


def test_what_fails_leaves_nothing(
    target: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(DSparkError, match=r"cannot build .*No space left.*free some disk"):
        ensure_deeper(target, 2.0)
    assert not list((cache / "models").iterdir())


def test_a_drafter_fits_its_deeper_target(target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 144}))
    drafter = shipped_drafter_path()
    fitted = ensure_fitted(drafter, target)
    own, other = (json.loads((d / "config.json").read_text()) for d in (drafter, fitted))
    assert other == own | {"num_target_layers": 144}
    for name in ("model.safetensors", "sts.json"):
        assert (fitted / name).read_bytes() == (drafter / name).read_bytes()
    assert ensure_fitted(drafter, target) == fitted
    without = shipped_drafter_path("smollm2-135m-mtp")  # does not say how deep its target is
    assert ensure_fitted(without, target) == without


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types speaks of every layer"),
        ({"num_hidden_layers": "three"}, "config.json is no model's configuration .'three' is no"),
    ],
)
def test_other_models_are_refused(target: Path, change: dict[str, object], said: str) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(DSparkError, match=said):
        ensure_deeper(target, 2.0)


def test_a_model_without_those_projections_is_refused(target: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = target / "model.safetensors"
    renamed = {name.replace("o_proj", "dense"): value for name, value in load_file(file).items()}
    save_file(renamed, file, {"format": "pt"})
    with pytest.raises(DSparkError, match=r"has no self_attn\.o_proj to make zero"):
        ensure_deeper(target, 2.0)
    with pytest.raises(DSparkError, match="give a number above 1"):
        ensure_deeper(target, 1.0)
