"""A target's directory that is not whole: one line instead of a traceback or of random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from tests.evaluation.conftest import Pair

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
