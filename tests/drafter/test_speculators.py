"""Small synthetic checkpoints in the layout of the `speculators` library, with the fields and the
names of weights that its version 0.9.0 writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from sglang_dspark.drafter import DrafterConfig, DSparkDrafter, load_drafter, save_drafter
from sglang_dspark.drafter.speculators import QWEN3_DEFAULTS
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.registry import drafter_kind
from sglang_dspark.serving.checkpoint import validate_drafter
from tests.drafter.helpers import tiny_drafter


def written(path: Path, drafter: DSparkDrafter, **changes: Any) -> Path:
    """The drafter as `speculators` writes it; changes: of config.json, `layers` of its layers."""
    save_drafter(drafter, path)
    c = drafter.config
    layers = {
        "model_type": "qwen3",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * c.num_layers,
        "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
        **changes.pop("layers", {}),
    }
    config = {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],
        "block_size": c.gamma,
        "draft_vocab_size": c.vocab_size,
        "enable_confidence_head": c.confidence_head,
        "confidence_head_with_markov": c.confidence_head_with_markov,
        "markov_head_type": c.markov_head_type,
        "markov_rank": c.markov_rank,
        "mask_token_id": c.mask_token_id,
        "sample_from_anchor": True,
        "speculators_config": {"algorithm": "dspark"},
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": layers,
        **changes,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def refused(path: Path, **changes: Any) -> str:
    written(path, tiny_drafter(), **changes)
    with pytest.raises(DSparkError) as raised:
        DrafterConfig.from_dir(path)
    message = str(raised.value)
    assert str(path / "config.json") in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["DSparkDraftModel", "DSparkSpeculator"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_it_drafts_as_the_drafter_that_was_written(tmp_path: Path, name: str, head: str) -> None:
    made = tiny_drafter(markov_head_type=head, num_target_layers=3)
    path = written(tmp_path / "d", made, architectures=[name])
    read = load_drafter(path, made.embed_weight, made.head_weight)
    assert drafter_kind(path) == "dspark"
    assert read.config.target_layer_ids == (0, 2)
    assert read.config.num_target_layers == 3  # the least; the layout does not tell
    assert (read.config.gamma, read.config.markov_head_type) == (4, head)
    for key, tensor in made.state_dict().items():
        torch.testing.assert_close(read.state_dict()[key], tensor, msg=key)


def test_extra_weights_are_left_aside(tmp_path: Path) -> None:
    """Older versions of the library kept copies of the target's."""
    made = tiny_drafter()
    path = written(tmp_path / "d", made)
    tensors = load_file(path / "model.safetensors")
    tensors |= {"embed_tokens.weight": torch.zeros(61, 32), "t2d": torch.ones(61, dtype=torch.bool)}
    save_file(tensors, path / "model.safetensors")
    read = load_drafter(path, made.embed_weight, made.head_weight)
    torch.testing.assert_close(read.embed_weight, made.embed_weight)


def test_what_the_library_omits_is_a_default_of_transformers() -> None:
    theirs = Qwen3Config().to_dict()
    assert {name: theirs[name] for name in QWEN3_DEFAULTS} == dict(QWEN3_DEFAULTS)


def test_an_omitted_shape_is_the_default(tmp_path: Path) -> None:
    path = written(tmp_path / "d", tiny_drafter(), markov_rank=8)
    raw = json.loads((path / "config.json").read_text())
    for name in ("head_dim", "num_key_value_heads", "num_attention_heads"):
        del raw["transformer_layer_config"][name]
    del raw["markov_rank"]
    (path / "config.json").write_text(json.dumps(raw))
    read = DrafterConfig.from_dir(path)
    assert (read.head_dim, read.num_kv_heads, read.num_heads) == (128, 32, 32)
    assert read.markov_rank == 256


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speculators_model_type", "dflash"),
        ("speculators_model_type", "eagle3"),
        ("transformer_layer_config", None),
        ("sample_from_anchor", None),
        ("sample_from_anchor", 1),
        ("draft_vocab_size", 62),
        ("draft_vocab_size", None),
        ("markov_rank", 0),
        ("target_hidden_size", 64),
        ("aux_hidden_state_layer_ids", None),
        ("aux_hidden_state_layer_ids", [0, 2]),
        ("aux_hidden_state_layer_ids", ["1"]),
        ("mask_token_id", None),
        ("mask_token_id", -1),
        ("block_size", "8"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, field: str, value: Any) -> None:
    message = refused(tmp_path / "d", **{field: value})
    assert f"{field} is {value!r}; of the Speculators layout only" in message


def test_layers_that_are_not_computed_are_named(tmp_path: Path) -> None:
    other = refused(tmp_path / "a", layers={"model_type": "llama"})
    assert "transformer_layer_config.model_type is 'llama'" in other
    chunked = refused(tmp_path / "b", layers={"layer_types": ["chunked_attention"] * 2})
    assert "transformer_layer_config.layer_types is ['chunked_attention'" in chunked


def test_a_server_says_what_to_do_with_it(tmp_path: Path) -> None:
    path = written(tmp_path / "d", tiny_drafter())
    with pytest.raises(
        DSparkError, match=rf"layout of Speculators .*dspark models convert {path} --target"
    ):
        validate_drafter(path, Target("t", 32, 61, 4))
