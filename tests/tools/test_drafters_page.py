"""Tables of docs/results-drafters.md are those of results/; only equal training is compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from tools.docs import drafters


def test_the_page_is_its_files() -> None:
    text = drafters.PAGE.read_text()
    assert drafters.page(text) == text, "run `python -m tools.docs.drafters`"


def test_a_changed_figure_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drafters.PAGE.read_text()
    document = drafters._document

    def changed(name: str) -> object:
        found = document(name)
        if name == "drafters_tau":
            found["metrics"]["tau"]["eagle3"]["chat"] += 0.01
        return found

    monkeypatch.setattr(drafters, "_document", changed)
    assert drafters.page(text) != text


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("steps: 2000", "steps: 4000", "steps"),
        ("anchors_per_sequence: 12", "anchors_per_sequence: 72", "anchors_per_sequence"),
        ("runs/answers/states", "runs/other/states", "data"),
        ("gamma: 7", "gamma: 5", "gamma"),
    ],
)
def test_recipes_that_differ_are_not_called_alike(
    before: str, after: str, key: str, tmp_path: Path
) -> None:
    shutil.copytree(drafters.RECIPES, tmp_path / "paper")
    recipe = tmp_path / "paper" / "dflash.yaml"
    text = recipe.read_text()
    # Comments name the same folders.
    body = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert body.count(before) == 1
    recipe.write_text(body.replace(before, after))
    with pytest.raises(DSparkError, match=rf"dflash.yaml differs from dspark.yaml in .*{key}"):
        drafters.trained_alike(tmp_path / "paper")
    assert "2,000 steps of 72 blocks of 7" in drafters.trained_alike(drafters.RECIPES)
