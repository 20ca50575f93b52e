"""Tables of docs/results-drafters.md are those of results/; only equal training is compared."""

from __future__ import annotations

import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.trace_plan import load_plan
from sglang_dspark.training.config import load_config
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


def test_a_ratio_is_turned_with_its_interval() -> None:
    assert drafters._less({"value": 0.8, "low": 0.5, "high": 1.25}) == "+25.0% (-20.0 to +100.0)"


CHANGES = {  # of the runs whose names do not say it: fields other than the base's
    "no-head": {"kind"},
    "gated": {"markov_head_type"},
    "rnn": {"markov_head_type"},
    "rank-64": {"markov_rank"},
    "rank-256": {"markov_rank"},
    "cross-entropy": {"ce", "tv"},
    "no-confidence": {"confidence", "confidence_head"},
    "seed-1": {"seed"},
    "no-head-gamma-16": {"kind", "gamma"},
}
_NOT_LEARNT = {"log_every", "checkpoint_every", "validate_every"}


def _facts(made_by: str) -> dict[str, object]:
    """Return what a training command learns from and how, every field by its name."""
    words = shlex.split(made_by)
    sets = [value for option, value in pairwise(words) if option == "--set"]
    cfg = load_config(drafters.ROOT / words[words.index("--config") + 1], sets)
    parts = (cfg.data, cfg.drafter, cfg.objective, cfg.schedule)
    found = {name: value for part in parts for name, value in part.model_dump().items()}
    return {"data_seed": cfg.data.seed, **found}


PLAN = load_plan(drafters.ROOT / "configs" / "eval" / "traces.yaml").drafters
LABELS = [name.removeprefix("ablation-") for name in PLAN if name.startswith("ablation-")]


@pytest.mark.parametrize("label", [each for each in LABELS if each != "base"])
def test_an_ablation_changes_one_thing(label: str) -> None:
    base, other = _facts(PLAN["ablation-base"].made_by), _facts(PLAN[f"ablation-{label}"].made_by)
    shared = base.keys() & other.keys() - _NOT_LEARNT
    changed = {name for name in shared if base[name] != other[name]}
    assert changed == CHANGES.get(label, {label.split("-")[0]})
    if label.split("-")[0] in ("gamma", "layers", "rank"):
        assert str(max(other[name] for name in changed)) == label.split("-")[1]  # type: ignore[type-var]


def test_the_ablations_shown_are_in_the_plan() -> None:
    shown = [label for _, changes in drafters.ABLATIONS.values() for label in changes]
    assert set(shown) <= set(LABELS)
    assert len(shown) == len(set(shown))
