"""Figures and the page: every analysis draws, the same numbers give the same bytes."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation import analyses, figures, page
from sglang_dspark.evaluation.limits import limits
from sglang_dspark.evaluation.reliability import as_metrics, reliability
from sglang_dspark.evaluation.roc import roc
from sglang_dspark.schedule.calibration import Calibration
from tests.evaluation.trace_world import SETTINGS, drawn


def _clock(share: float) -> dict[str, float]:
    return {"round_s": 0.02, "loop_s": 0.02 * share, "share": share}


def _overhead() -> dict[str, Any]:
    row = {"label": "dspark", "gamma": 5, "engine": {"batch": 8}, "direct": {}}
    for way in ("engine", "direct"):
        row[way] |= {clock: _clock(0.03) for clock in ("wall", "thread_cpu")}  # type: ignore[operator]
    settings = {**SETTINGS, "context": 9}
    return {"analysis": "overhead", "target": "t", "settings": settings, "drafters": [row]}


def _curves() -> dict[str, Any]:
    points = [{"step": 500, "held_out_tau": 1.5}, {"step": 1000, "held_out_tau": 1.75}]
    run = {"kind": "dspark", "layers": 3, "points": points}
    settings = {"temperature": 1.0, "teacher_forced": True}
    runs = {"dspark": run, "short": {**run, "points": points[:1]}}
    return {"analysis": "curves", "target": "t", "settings": settings, "runs": runs}


@pytest.fixture(scope="module")
def metrics() -> dict[str, dict[str, Any]]:
    """One of each analysis, as it comes back from its JSON."""
    one, other = drawn(prompts=4), drawn(prompts=4, layers=1)
    found = [
        analyses.tau_table({"dspark": one, "dflash": other}),
        analyses.positions({"dspark": one, "dflash": other}),
        analyses.depth([("dspark", one), ("dspark", other)]),
        analyses.length([("vanilla", drawn(prompts=4, gamma=2)), ("vanilla", one)]),
        analyses.thresholds({"dspark": one}, points=8),
        roc({"dspark": one, "dflash": other}),
        limits({"dspark": one, "dflash": other}, frozenset({0, 1})),
        _curves(),
        as_metrics("dspark", one, reliability(one, {"after": Calibration((1.5,) * 4)})),
        _overhead(),
    ]
    return {each["analysis"]: json.loads(json.dumps(_null(each))) for each in found}


def _null(value: Any) -> Any:
    """As result files are written: null for NaN."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {key: _null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_null(item) for item in value]
    return value


@pytest.mark.parametrize("name", page.ORDER)
def test_every_analysis_has_a_figure_and_a_table(
    name: str, metrics: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    written = figures.save(figures.draw(metrics[name]), tmp_path / "figures" / name)
    png, svg = (path.read_bytes() for path in written)
    assert png.startswith(b"\x89PNG")
    assert b"</svg>" in svg
    assert len(list((tmp_path / "figures").iterdir())) == 2, "no temporary file is left"
    for table in page.tables(metrics[name]):
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.head)}


def test_same_numbers_give_the_same_bytes(
    metrics: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    first, second = (
        figures.save(figures.draw(metrics["overhead"]), tmp_path / name) for name in ("a", "b")
    )
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_eight_drafters_have_eight_colours(metrics: dict[str, dict[str, Any]]) -> None:
    one = metrics["tau"]["tau"]["dspark"], metrics["tau"]["interval"]["dspark"]
    labels = [f"drafter {i}" for i in range(8)]
    many = {
        **metrics["tau"],
        "tau": dict.fromkeys(labels, one[0]),
        "interval": dict.fromkeys(labels, one[1]),
    }
    (axes,) = figures.draw(many).axes
    bars = [each for each in axes.containers if hasattr(each, "patches")]
    assert len({bar.patches[0].get_facecolor() for bar in bars}) == len(labels)


def test_unknown_analysis_is_named() -> None:
    with pytest.raises(DSparkError, match="no figure for the analysis 'zodiac'"):
        figures.draw({"analysis": "zodiac"})


def _write(folder: Path, metrics: dict[str, dict[str, Any]]) -> None:
    for name, each in metrics.items():
        document = {
            "name": f"drafters_{name}", "command": "dspark eval <b>", "commit": "c0ffee",
            "device": "cpu", "date": "2026-11-21", "metrics": each,
        }  # fmt: skip
        (folder / f"drafters_{name}.json").write_text(json.dumps(document))


def test_page_is_self_contained(metrics: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    _write(tmp_path, metrics)
    results = page.read_results(tmp_path)
    assert [result.metrics["analysis"] for result in results] == list(page.ORDER)
    html = page.render(results[::4], "Drafters")
    assert len(re.findall('src="data:image/svg', html)) == len(results[::4])
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert "dspark eval &lt;b&gt;" in html, "text is escaped"
    assert "c0ffee" in html
    pictures = re.findall('base64,([^"]+)', html)
    assert all(b"</svg>" in base64.b64decode(picture) for picture in pictures)


def test_summary_has_the_keys_that_others_read(
    metrics: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    _write(tmp_path, metrics)
    summary = page.drafter_summary(page.read_results(tmp_path))
    assert set(summary["tau"]["dspark"]) == {"math", "chat", "macro"}
    assert set(summary["ece_before"]) == set(summary["ece_after"]) == {"math", "chat", "overall"}
    assert 0.5 < summary["auc"] < 1
    assert summary["sequential_share"] == 0.03


def test_committed_results_redraw(tmp_path: Path) -> None:
    """`dspark report --drafters` reads every published drafters_*.json and draws each of them."""
    folder = Path(__file__).parents[2] / "results"
    found = page.read_results(folder)
    assert {result.stem for result in found} == {p.stem for p in folder.glob("drafters_*.json")}
    for result in found:
        assert {"name", "command", "commit", "device", "date"} <= set(result.document)
        assert figures.draw(result.metrics).axes, result.stem
        assert all(table.rows for table in page.tables(result.metrics)), result.stem


def test_results_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="no drafters_"):
        page.read_results(tmp_path)
    (tmp_path / "drafters_x.json").write_text('{"metrics": {"analysis": "zodiac"}}')
    with pytest.raises(DSparkError, match=r"drafters_x\.json is no result"):
        page.read_results(tmp_path)
