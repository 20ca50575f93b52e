"""Generated pages and schemas are what the code says; the schemas take the shipped files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.docs.pages import DOCS, ROOT
from tools.docs import gpu_results, reference, settings

HOW = "stale: run `make docs-reference`"
SHIPPED = {
    "training": "configs/train",
    "sweep": "configs/sweep",
    "golden": "configs/golden",
    "arm": "configs/serve",
    "traces": "configs/eval",
}


def schema(slug: str) -> dict[str, Any]:
    return settings.schema_of(next(d for d in settings.DOCUMENTS if d.slug == slug))


def test_generated_files_are_up_to_date() -> None:
    for name, text in reference.generated().items():
        file = DOCS / name
        assert file.is_file(), f"docs/{name} is missing; {HOW}"
        assert file.read_text() == text, f"docs/{name} is {HOW}"


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    assert set(reference.write(tmp_path)) == set(reference.generated())
    (tmp_path / "metrics.md").write_text("old")
    assert reference.write(tmp_path) == ["metrics.md"]
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("slug", SHIPPED)
def test_schemas_take_the_shipped_files(slug: str) -> None:
    checker = jsonschema.Draft202012Validator(schema(slug))
    files = sorted((ROOT / SHIPPED[slug]).rglob("*.yaml"))
    assert files
    for file in files:
        checker.validate(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize(
    ("slug", "value"),
    [
        ("server", {"schedule": {"modus": "auto"}}),
        ("server", {"cpu": {"threads": 0}}),
        ("training", {"run_dir": "runs/x"}),
        ("sweep", {"arms": ["plain"], "concurrency": [1], "smoke": {"secnods": 5}}),
        ("golden", {"shape": "tiny", "doubtful": 2, "right": 0.5, "otherwise": 0.9, "source": "x"}),
        ("arm", {"about": "x", "device": "tpu"}),
    ],
)
def test_schemas_refuse_what_the_code_refuses(slug: str, value: dict[str, Any]) -> None:
    assert not jsonschema.Draft202012Validator(schema(slug)).is_valid(value)


def test_a_field_without_a_description_stops_the_generator() -> None:
    document = settings.DOCUMENTS[0]
    section = {"properties": {"bare": {"type": "integer", "default": 1}}}
    with pytest.raises(SystemExit, match="bare has no description"):
        settings._table(document, section)


def test_a_gpu_run_in_graphs_is_a_table_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of earlier runs stay readable next to it; none is needed."""
    results = tmp_path / "results"
    results.mkdir()
    for file in gpu_results._RESULTS.glob("gpu_*.json"):
        shutil.copy(file, results)
    monkeypatch.setattr(gpu_results, "_RESULTS", results)
    before = gpu_results.in_graphs()
    assert before.count("In captured graphs") == len(list(results.glob("gpu_operators_*.json")))
    ours = {"op": "accept", "shape": [16, 7, 151936], "case": "none", "implementation": "ours"}
    rows = [
        {**ours, "eager_us": 99.6, "us": 61.4},
        {**ours, "implementation": "SGLang", "us": None, "reason": "ValueError: no"},
        {"op": "commit", "shape": [1, 7], "case": "whole", "implementation": "ours", "us": 9.0},
    ]
    document = {"device": "NVIDIA H100", "commit": "abc1234", "metrics": {"rows": rows}}
    (results / "gpu_operators_h100.json").write_text(json.dumps(document))
    after = gpu_results.in_graphs()
    assert after.endswith(before)
    assert "on an NVIDIA H100, float32 logits" in after
    assert "| operator | implementation | 1 request | 16 requests |" in after
    assert "| sampled acceptance, without cuts | ours |  | 61 (100) |" in after
    assert "| sampled acceptance, without cuts | SGLang |  | none |" in after
    assert "| commit, whole | ours | 9 |  |\n\nnone: ValueError: no\n" in after
