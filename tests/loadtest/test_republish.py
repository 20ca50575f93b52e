"""Published ratios taken anew from the trials that a result file keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.errors import DSparkError
from sglang_dspark.intervals import METHOD, paired_ratio
from sglang_dspark.loadtest.bench.adaptive import Figure
from sglang_dspark.loadtest.bench.adaptive_results import as_metrics
from sglang_dspark.loadtest.bench.republish import republish

ROOT = Path(__file__).resolve().parents[2]
SPEEDS = {
    "plain": [100.0, 90.0, 110.0, 105.0],
    "fixed-1": [99.0, 95.0, 101.0, 100.0],
    "scheduled": [110.0, 96.0, 118.0, 109.0],
}


def adaptive_metrics() -> dict[str, Any]:
    figures = [
        Figure(trial, users, arm, speed, None if arm == "plain" else 1.5, 10.0, 1.0)
        for users in (1, 4)
        for arm, speeds in SPEEDS.items()
        for trial, speed in enumerate(speeds)
    ]
    return as_metrics(figures, (1, 4))


def written(path: Path, metrics: dict[str, Any]) -> Path:
    facts = {"name": "x", "command": "dspark bench", "commit": "abc", "device": "d", "date": "now"}
    path.write_text(json.dumps({**facts, "metrics": metrics}))
    return path


def test_what_a_run_writes_can_be_taken_again_from_itself(tmp_path: Path) -> None:
    fresh = adaptive_metrics()
    before = json.loads(written(tmp_path / "a.json", fresh).read_text())
    republish(tmp_path / "a.json")
    after = json.loads((tmp_path / "a.json").read_text())
    assert after["metrics"] == before["metrics"]
    kept = ("name", "command", "commit", "device", "date")
    assert [after[key] for key in kept] == [before[key] for key in kept]
    assert after["intervals"]["commit"] != "abc"


def test_an_older_interval_is_replaced_and_its_figure_drawn(tmp_path: Path) -> None:
    old = adaptive_metrics()
    for row in old["by_concurrency"]:
        row["over_plain"] |= {"low": 1.0799, "high": 1.0801, "method": "paired bootstrap"}
        row["verdicts"] = ["a sentence of the older interval"]
    old["verdicts"] = ["a sentence of the older interval"]
    path = written(tmp_path / "a.json", old)
    out = CliRunner().invoke(app, ["report", "--intervals", str(path)])
    assert out.exit_code == 0, out.output
    found = json.loads(path.read_text())["metrics"]
    wanted = paired_ratio(SPEEDS["scheduled"], SPEEDS["plain"])
    for row in found["by_concurrency"]:
        assert [row["over_plain"]["low"], row["over_plain"]["high"]] == wanted.bounds
        assert row["over_plain"]["method"] == METHOD
    assert "older" not in str(found)
    assert (tmp_path / "figures" / "a.png").stat().st_size > 10_000


def test_intervals_without_their_trials_are_taken_out(tmp_path: Path) -> None:
    """A file of `bench serve` that kept busy throughput alone."""
    repeats = {"plain": [20.0, 21.0, 22.0], "dspark": [30.0, 33.0, 32.0]}
    row = {"concurrency": 1, "speedup": 1.5, "speedup_ci95": [1.4, 1.6], "repeats": repeats}
    row |= {"whole_round_speedup": 1.4, "whole_round_speedup_ci95": [1.3, 1.5]}
    step = {"verify_ms": 50.0, "plain_decode_ms": 40.0, "ratio": 1.25, "ratio_ci95": [1.2, 1.3]}
    metrics = {"by_concurrency": [row], "step": step, "speedup_vs_plain_c1": 1.5, "gamma": 5}
    found = republish(written(tmp_path / "s.json", metrics))
    (again,) = found["by_concurrency"]
    ratio = paired_ratio(repeats["dspark"], repeats["plain"])
    assert found["speedup_vs_plain_c1"] == again["speedup"] == ratio.mid
    assert again["speedup_ci95"] == ratio.bounds
    assert (again["whole_round_speedup"], again["whole_round_speedup_ci95"]) == (1.4, None)
    assert found["step"] == {**step, "ratio_ci95": None}
    kept = {"verify_ms": [50.0, 51.0, 52.0], "plain_decode_ms": [40.0, 40.5, 40.0]}
    metrics["step"] = {**step, "repeats": kept}
    step = republish(written(tmp_path / "s.json", metrics))["step"]
    assert step["ratio_ci95"] == paired_ratio(*kept.values()).bounds


PUBLISHED = [*ROOT.glob("results/adaptive_*.json"), *ROOT.glob("results/serve_*.json")]


@pytest.mark.parametrize("path", PUBLISHED, ids=[path.stem for path in PUBLISHED])
def test_published_intervals_follow_from_published_trials(path: Path) -> None:
    metrics = json.loads(path.read_text())["metrics"]
    for row in metrics["by_concurrency"]:
        if "trials" in row:
            low_high = [row["over_plain"]["low"], row["over_plain"]["high"]]
            over, under = row["trials"]["scheduled"], row["trials"]["plain"]
        else:
            low_high = row["speedup_ci95"]
            over, under = row["repeats"]["dspark"], row["repeats"]["plain"]
        assert low_high == pytest.approx(paired_ratio(over, under).bounds)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"metrics": {"by_concurrency": [{}]}}'])
def test_another_file_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DSparkError, match="is no result of") as told:
        republish(path)
    assert "\n" not in str(told.value)
    assert path.read_text() == content
    with pytest.raises(DSparkError, match="cannot read"):
        republish(tmp_path / "none.json")
