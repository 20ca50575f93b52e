"""Every fault of a file that is read names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dspark.common.files import load_yaml, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.cell import CellPlan, CellPrompt
from sglang_dspark.loadtest.client.schedule import Arrival, Schedule


@pytest.mark.parametrize(
    "error", [DSparkError("a trial has no speed"), KeyError("x"), OSError(5, "Input/output error")]
)
def test_a_fault_names_the_file(error: Exception) -> None:
    with pytest.raises(DSparkError, match=r"here/a\.json"), reading(Path("here/a.json"), "b", "c"):
        raise error


def test_a_file_is_named_once() -> None:
    known = DSparkError("a.json: no trial")
    with pytest.raises(DSparkError) as raised, reading(Path("a.json"), "result", "measure again"):
        raise known
    assert raised.value is known


@pytest.mark.parametrize("content", [3, None, {"a": 1}])
def test_a_cell_is_not_taken_with_a_prompt_that_cannot_be_sent(
    tmp_path: Path, content: object
) -> None:
    path = tmp_path / "cell.json"
    plan = CellPlan("generate", (CellPrompt("a", "b", "c"),), Schedule((Arrival(0, 0, 0, 4),), 1))
    plan.save(path)
    row = json.loads(path.read_text())
    row["prompts"][0]["content"] = content
    path.write_text(json.dumps(row))
    with pytest.raises(DSparkError, match=f"{path}: a prompt of the cell is neither text nor"):
        CellPlan.load(path)


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\udaa6": 1}', '["x", "a\\udda6b"]'])
def test_half_a_character_is_not_taken_from_yaml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        load_yaml(path)
