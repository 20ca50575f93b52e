"""Checkpoints of the baselines: round trips, names that SGLang loads, and clear refusals."""

from __future__ import annotations

import json
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sglang_dspark.drafter import save_drafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.registry import drafter_kind, drafter_layers, family_of, open_drafter
from tests.drafter.helpers import tiny_drafter
from tests.evaluation.conftest import VOCAB
from tests.families.conftest import DRAFT_IDS, LEARNERS, Lesson, learner_of
from tests.families.helpers import KINDS, LAYERS, random_drafter

LIST_OF_INTEGERS = {  # the instructions of a pickled list of integers
    "PROTO", "EMPTY_LIST", "BINPUT", "MARK", "BININT1", "BININT2", "BININT", "APPENDS", "APPEND",
    "STOP",
}  # fmt: skip

NAMES = {  # of a family, some tensors as SGLang's loader calls them
    "dflash": {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.1.self_attn.q_norm.weight",
    },
    "eagle3": {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.self_attn.q_proj.weight",
    },
    "mtp": {
        "fc.weight",
        "fc.bias",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.mlp.up_proj.weight",
    },
}


def _save(kind: str, path: Path, target: TargetModel, reduced: bool = True) -> object:
    ids = DRAFT_IDS if reduced else None
    drafter = random_drafter(kind, VOCAB, ids)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())  # what the file keeps
    learner_of(drafter, kind, target, ids).export(path)
    return drafter


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, reduced: bool, target: TargetModel, tmp_path: Path) -> None:
    drafter = _save(kind, tmp_path, target, reduced)
    assert drafter_kind(tmp_path) == kind
    assert drafter_layers(tmp_path) == (LAYERS if family_of(tmp_path).reads_features else ())
    again = open_drafter(tmp_path, target)
    assert type(again) is type(drafter)
    assert again.config == drafter.config  # type: ignore[attr-defined]
    ours, theirs = drafter.state_dict(), again.state_dict()  # type: ignore[attr-defined]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k].bfloat16(), theirs[k].bfloat16()) for k in ours)
    if reduced:
        assert torch.equal(again.draft_ids, DRAFT_IDS)
    else:
        assert again.draft_ids is None
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_upstream(kind: str, target: TargetModel, tmp_path: Path) -> None:
    _save(kind, tmp_path, target)
    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        names = set(file.keys())
        assert names >= NAMES[kind]
        assert (
            file.get_tensor("d2t").tolist() == (DRAFT_IDS - torch.arange(len(DRAFT_IDS))).tolist()
        )
        if kind == "eagle3":
            assert file.get_tensor("t2d").nonzero()[:, 0].tolist() == DRAFT_IDS.tolist()
    config = json.loads((tmp_path / "config.json").read_text())
    if kind == "dflash":
        assert config["block_size"] == random_drafter(kind, VOCAB).config.gamma + 1
        assert "markov_rank" not in config
    if kind == "mtp":
        assert numbers_in(tmp_path / "token_map.pt") == DRAFT_IDS.tolist()


def numbers_in(path: Path) -> list[int]:
    """The integers of a list that `torch.save` wrote, read from its instructions: none is run."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("data.pkl")]
        opcodes = list(pickletools.genops(archive.read(name)))
    assert {opcode.name for opcode, _, _ in opcodes} <= LIST_OF_INTEGERS
    return [argument for opcode, argument, _ in opcodes if opcode.name.startswith("BININT")]


def test_dspark_checkpoint_is_recognised(tmp_path: Path) -> None:
    save_drafter(tiny_drafter(), tmp_path)
    assert drafter_kind(tmp_path) == "dspark"
    assert drafter_layers(tmp_path) == (0, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_another_target_is_refused(kind: str, target: TargetModel, tmp_path: Path) -> None:
    _save(kind, tmp_path, target)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "vocab_size": VOCAB + 1}))
    with pytest.raises(DSparkError, match=rf"vocab_size is {VOCAB + 1}, but the target"):
        open_drafter(tmp_path, target)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_one_clear_line(kind: str, target: TargetModel, tmp_path: Path) -> None:
    _save(kind, tmp_path, target)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    raw, bytes_ = json.loads(config.read_text()), weights.read_bytes()

    def refused(match: str) -> None:
        with pytest.raises(DSparkError, match=match) as error:
            open_drafter(tmp_path, target)
        assert "\n" not in str(error.value)

    config.write_text(json.dumps({**raw, "intermediate_size": 97}))
    refused(r"_proj\.weight has shape \[96, 64\], but config.json implies \[97, 64\]")
    config.write_text(json.dumps({k: v for k, v in raw.items() if k != "hidden_size"}))
    refused("'hidden_size' is missing")
    config.write_text(json.dumps({**raw, "architectures": ["GPT2LMHeadModel"]}))
    refused("in config.json is no drafter")
    config.write_text("{")
    refused("is not JSON")
    config.unlink()
    refused("no drafter at")
    config.write_text(json.dumps(raw))
    weights.write_bytes(bytes_[:-100])
    refused("is truncated or corrupt")
    weights.unlink()
    refused("has no safetensors file")


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_draft_vocabulary_must_fit(kind: str, target: TargetModel, tmp_path: Path) -> None:
    _save(kind, tmp_path, target)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "draft_vocab_size": 7}))
    with pytest.raises(DSparkError, match=f"d2t names {len(DRAFT_IDS)} tokens"):
        open_drafter(tmp_path, target)
    file.write_text(json.dumps({**raw, "num_hidden_layers": 2}))
    with pytest.raises(DSparkError, match="num_hidden_layers is 2"):
        open_drafter(tmp_path, target)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="must ascend"):
        random_drafter("mtp", VOCAB, torch.tensor([3, 3, 5]))
    with pytest.raises(ValueError, match="must ascend"):
        random_drafter("dflash", VOCAB, torch.tensor([3, VOCAB]))


def test_every_kind_has_a_learner(lessons: dict[str, Lesson]) -> None:
    assert set(LEARNERS) == set(KINDS) == set(lessons)
