"""One verdict on each drafter, of a server's check, `eval`, `calibrate` and `models convert`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dspark.cli.main import main
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.dflash.checkpoint import save_dflash
from sglang_dspark.families.registry import drafter_layers, open_drafter
from sglang_dspark.serving.checkpoint import convert_drafter, validate_drafter
from sglang_dspark.training.answering import open_calibrated
from tests.drafter.variants import (
    CONVERT,
    REFUSED,
    SERVED,
    TAKEN,
    UNSERVED,
    Variant,
    config_of,
    variants,
    weights_of,
)
from tests.evaluation.conftest import LAYERS, build_drafter, build_target
from tests.families.helpers import random_drafter

NAN = torch.full((64,), float("nan"))
DSPARK_HEAD = {"markov_head.markov_w1.weight": torch.zeros(61, 8)}
VARIANTS = tuple(variants())
TARGET = Target("TARGET", 32, 61, 4, "LlamaForCausalLM")
READERS = ("server", "eval", "calibrate", "convert")


class Opened:
    """Weights that readers take from an open target."""

    embed_weight = head_weight = torch.randn(61, 32, generator=torch.Generator().manual_seed(1))
    num_layers = 4


def said(reader: str, path: Path, out: Path) -> str | None:
    """The line that a reader refuses a drafter with; None: it takes it."""
    opened: Any = Opened()
    try:
        if reader == "server":
            validate_drafter(path, TARGET)
        elif reader == "eval":
            drafter_layers(path)
            open_drafter(path, opened)
        elif reader == "calibrate":
            open_calibrated(path, opened)
        else:
            convert_drafter(path, out, TARGET)
    except DSparkError as error:
        return str(error)
    return None


def core(line: str) -> str:
    """A line without what the reader is called with, or which other kinds it reads."""
    return line.replace("target TARGET", "target of this command").partition(
        " in config.json is no "
    )[0]


def test_there_are_enough_of_them() -> None:
    assert len(VARIANTS) >= 150
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_reader_has_the_same_verdict(variant: Variant, tmp_path: Path) -> None:
    path, out = tmp_path / "drafter", tmp_path / "out"
    path.mkdir()
    variant.make(path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    lines = {reader: said(reader, path, out) for reader in READERS}
    refusing: set[str] = {
        TAKEN: set[str](),
        REFUSED: set(READERS),
        CONVERT: {"server"},
        SERVED: {"eval", "calibrate", "convert"},
        UNSERVED: {"server", "convert"},
    }[variant.verdict]
    assert {reader for reader, line in lines.items() if line is not None} == refusing, lines
    for line in filter(None, lines.values()):
        assert variant.says in line
        assert str(path) in line
        assert ";" in line, "the part behind the semicolon says what to do"
        assert line.isprintable()
        assert len(line) < 600
    assert len({core(line) for line in lines.values() if line}) <= 1, lines
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    if "convert" in refusing:
        assert not out.exists(), "nothing is written for a drafter that is refused"
    else:
        _converted_alike(path, out)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda found: found | DSPARK_HEAD,
            "nothing reads the weight markov_head.markov_w1.weight",
        ),
        (
            lambda found: found | {"norm.weight": NAN},
            "the weight norm.weight holds NaN or infinite values",
        ),
        (lambda found: {f"module.{k}": v for k, v in found.items()}, ""),
    ],
)
def test_other_kinds_are_read_by_the_same_rules(change: Any, says: str, tmp_path: Path) -> None:
    """DSpark's weights under DFlash's name drafted without their head."""
    drafter: Any = random_drafter("dflash", 61)
    save_dflash(drafter, tmp_path)
    weights_of(tmp_path, change)
    opened: Any = Opened()
    opened.embed_weight = opened.head_weight = torch.randn(61, 64)
    if not says:
        open_drafter(tmp_path, opened)
        return
    with pytest.raises(DSparkError, match=says):
        open_drafter(tmp_path, opened)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and its drafter."""
    root = tmp_path_factory.mktemp("models")
    build_target(root / "target")
    build_drafter(root / "drafter", TargetModel.load(root / "target", LAYERS))
    return root


@pytest.mark.parametrize("command", ["eval", "calibrate", "models convert"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "nan in confidence_head.proj.bias",
            "confidence_head.proj.bias holds NaN or infinite values",
        ),
        ("no rope_theta", "rope_theta is missing"),
    ],
)
def test_commands_say_it_in_one_line(
    command: str, name: str, says: str, models: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    drafter = str(shutil.copytree(models / "drafter", tmp_path / "drafter"))
    if "rope" in name:
        config_of(tmp_path / "drafter", lambda raw: raw.pop("rope_theta"))
    else:
        bias = {"confidence_head.proj.bias": NAN[:1]}
        weights_of(tmp_path / "drafter", lambda found: found | bias)
    words = [*command.split(), "--target", str(models / "target")]
    words += [drafter] if command == "models convert" else ["--drafter", drafter]
    words += [] if command == "eval" else ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["dspark", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    line = capsys.readouterr().err
    assert ended.value.code == 1
    assert says in line
    assert len(line.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_eval_says_what_a_server_would_refuse(models: Path, capsys: Any, monkeypatch: Any) -> None:
    words = ["eval", "--drafter", str(models / "drafter"), "--target", str(models / "target")]
    monkeypatch.setattr(sys, "argv", ["dspark", *words, "--limit", "1", "--max-new-tokens", "4"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "a server would refuse it: drafter" in said
    assert "reads the output of the target's last layer (1)" in said


def _converted_alike(path: Path, out: Path) -> None:
    """A server takes what was converted, and it is the same drafter."""
    validate_drafter(out, TARGET)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    opened: Any = Opened()
    ours, theirs = open_drafter(path, opened), open_drafter(out, opened)
    for name, weight in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], weight, rtol=0, atol=0, msg=name)
    assert ours.config.rope_theta == theirs.config.rope_theta  # type: ignore[union-attr]
    assert json.loads((out / "config.json").read_text())["num_target_layers"] == 4
