"""The mean of two stages of a drafter has their weights' mean; others are refused in one line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from sglang_dspark.cli import train
from sglang_dspark.drafter import load_drafter
from sglang_dspark.drafter.checkpoint import write_checkpoint
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.mtp.checkpoint import TOKEN_MAP
from sglang_dspark.families.mtp.shape import MTPShape
from sglang_dspark.training.averaging import average
from sglang_dspark.training.setup import prepare
from tests.training.test_run import _in


def _stages(config, tmp_path):
    """Directories of a drafter after eight steps, and after eight more from there on."""
    first, _ = prepare(_in(config, tmp_path / "first", steps=8))
    first.run(lambda *_: None)
    start = {"start_from": tmp_path / "first" / "drafter"}
    going = config.model_copy(update={"drafter": config.drafter.model_copy(update=start)})
    second, _ = prepare(_in(going, tmp_path / "second", steps=8))
    second.run(lambda *_: None)
    return tmp_path / "first" / "drafter", tmp_path / "second" / "drafter"


def test_weights_are_the_mean_and_the_vocabulary_stays(config, tmp_path):
    first, second = _stages(config, tmp_path)
    out = tmp_path / "out"
    said = CliRunner().invoke(
        train.app, ["average", str(first), str(second), "--share", "0.25", "--out", str(out)]
    )
    assert said.exit_code == 0, said.output
    a, b, mean = (load_file(str(each / "model.safetensors")) for each in (first, second, out))
    assert any(not torch.equal(a[name], b[name]) for name in a)
    for name, found in mean.items():
        expected = (0.75 * a[name].double() + 0.25 * b[name].double()).to(a[name].dtype)
        torch.testing.assert_close(found, expected, rtol=2**-8, atol=0)  # one bfloat16 step
        assert found.dtype == a[name].dtype
    vocab = prepare(_in(config, tmp_path / "target"))[0].learner.module.config.vocab_size
    table = torch.zeros(vocab, config_width(out))
    tokens = [load_drafter(each, table, table).draft_ids.tolist() for each in (first, out)]
    assert tokens[0] == tokens[1]


def config_width(path):
    return json.loads((path / "config.json").read_text())["hidden_size"]


def test_mtp_is_averaged_too(config, tmp_path):
    shape = MTPShape(kind="mtp", gamma=1, target_layer_ids=(0, 1), draft_vocab=40)
    first, second = _stages(config.model_copy(update={"drafter": shape}), tmp_path)
    average(first, second, 1.0, tmp_path / "out")
    b, out = (load_file(str(each / "model.safetensors")) for each in (second, tmp_path / "out"))
    start = load_file(str(first / "model.safetensors"))
    assert any(not torch.equal(start[name], b[name]) for name in b)
    for name in b:
        assert torch.equal(b[name], out[name]), name
    maps = [(each / TOKEN_MAP).read_bytes() for each in (first, tmp_path / "out")]
    assert maps[0] == maps[1]


def test_a_bfloat16_drafter_is_averaged_with_a_stage_in_float32(config, tmp_path):
    """As shipped files and a run's own are; the result has the first one's type."""
    first, second = _stages(config, tmp_path)
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    tensors = load_file(str(first / "model.safetensors"))
    halves = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    write_checkpoint(shipped, halves, json.loads((first / "config.json").read_text()))
    average(shipped, second, 0.5, tmp_path / "out")
    kinds = {each.dtype for each in load_file(str(tmp_path / "out" / "model.safetensors")).values()}
    assert torch.bfloat16 in kinds
    assert torch.float32 not in kinds
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def _changed(path, to, change):
    shutil.copytree(path, to)
    tensors = load_file(str(to / "model.safetensors"))
    change(tensors)
    save_file(tensors, str(to / "model.safetensors"))
    return to


def _other_tokens(tensors):
    column = tensors["markov_head.markov_w2.weight"][:, -1]
    inside, outside = (column == 0).nonzero()[0, 0], (column != 0).nonzero()[0, 0]
    column[inside], column[outside] = column[outside].clone(), 0


def test_what_cannot_be_averaged_is_refused(config, tmp_path):
    first, second = _stages(config, tmp_path)
    with pytest.raises(DSparkError, match="is one of the two drafters"):
        average(first, second, 0.5, second)
    other = _changed(second, tmp_path / "tokens", _other_tokens)
    with pytest.raises(DSparkError, match="draft other tokens"):
        average(first, other, 0.5, tmp_path / "out")
    other = _changed(second, tmp_path / "names", lambda each: each.pop("fc.weight"))
    with pytest.raises(DSparkError, match="other names or shapes"):
        average(first, other, 0.5, tmp_path / "out")
    raw = json.loads((first / "config.json").read_text())
    shutil.copytree(second, tmp_path / "gamma")
    (tmp_path / "gamma" / "config.json").write_text(json.dumps(raw | {"block_size": 9}))
    with pytest.raises(DSparkError, match=r"another config\.json, in block_size"):
        average(first, tmp_path / "gamma", 0.5, tmp_path / "out")
    (tmp_path / "gamma" / "config.json").write_text(json.dumps(raw | {"expert_format": "fp8"}))
    with pytest.raises(DSparkError, match="quantised experts"):
        average(tmp_path / "gamma", second, 0.5, tmp_path / "out")
    assert not (tmp_path / "out").exists()
