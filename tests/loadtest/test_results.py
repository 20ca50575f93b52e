"""The result file: its keys, its bytes, and a place that cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.results import cpu_description, write_results


def test_results_file_keeps_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"
    write_results(path, "x", "a CPU", {"tau": 2.0, "none": float("nan"), "rows": [{"a": 1}]})
    written = json.loads(path.read_text())
    assert set(written) == {"name", "command", "commit", "device", "date", "metrics"}
    assert written["metrics"] == {"tau": 2.0, "none": None, "rows": [{"a": 1}]}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    with pytest.raises(DSparkError, match="cannot write results"):
        write_results(path / "below" / "a-file.json", "x", "a CPU", {})


def test_device_names_model_and_cores() -> None:
    model, isa, cores, threads = cpu_description().split("; ")
    assert model
    assert isa
    assert int(cores.split()[0]) >= 1
    assert threads.startswith("OMP_NUM_THREADS ")
