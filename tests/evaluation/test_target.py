"""A target's directory that is not whole: one line instead of a traceback or of random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from tests.evaluation.conftest import Pair
from tests.integration import tiny_models

WEIGHTS = "model.safetensors"


def _cut(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-9])


def _rubbish(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 99)


def _gone(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def _empty_index(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")


def _configured(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut weights": (_cut, "cannot load the model .*not fully covered"),
    "rubbish": (_rubbish, "cannot load the model .*header too large"),
    "no weights": (_gone, "cannot load the model .*no file named model.safetensors"),
    "no index": (_empty_index, "cannot load the model .*weight_map"),
    "other shapes": (_configured(intermediate_size=4), "cannot load the model "),
    "no such kind": (_configured(model_type="nope"), "cannot load the model .*`nope`"),
    "too few layers": (_configured(num_hidden_layers=9), r"lack \d+ tensors of .*model\.layers\."),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_whole_is_one_line(pair: Pair, tmp_path: Path, name: str) -> None:
    damage, says = CASES[name]
    folder = tmp_path / "target"
    shutil.copytree(pair.target_dir, folder)
    assert TargetModel.load(folder).config.num_hidden_layers
    damage(folder)
    with pytest.raises(DSparkError, match=says) as caught:
        TargetModel.load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Gemma3", "Qwen2"])
def test_the_embedding_is_what_the_target_reads(name: str, tmp_path: Path) -> None:
    """Gemma 3's has a scale in its module, and SGLang hands that module to drafters."""
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    tokens = torch.arange(16)
    with torch.no_grad():
        read = model.get_input_embeddings()(tokens)
    torch.testing.assert_close(TargetModel.load(tmp_path).embed_weight, read, rtol=1e-6, atol=0)
    assert (read != model.get_input_embeddings().weight).any() == (name == "Gemma3")


def test_layers_that_keep_a_state_are_refused(tmp_path: Path) -> None:
    tiny_models.build_target(16, architecture="qwen3_5").save_pretrained(tmp_path)
    with pytest.raises(DSparkError, match=r"keep a state \(linear_attention\)"):
        TargetModel.load(tmp_path)


@pytest.mark.parametrize(
    "field", [{"logit_scale": 0.0625}, {"logits_scaling": 8.0}, {"final_logit_softcapping": 30.0}]
)
def test_scaled_or_capped_logits_are_refused(
    pair: Pair, tmp_path: Path, field: dict[str, float]
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(pair.target_dir, folder)
    _configured(**dict.fromkeys(field, 1.0))(folder)
    TargetModel.load(folder)
    _configured(**field)(folder)
    with pytest.raises(DSparkError, match=f"scaled or capped .{next(iter(field))} "):
        TargetModel.load(folder)
