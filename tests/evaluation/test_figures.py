"""Figures and the page: every analysis draws, the same numbers give the same bytes."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation import figures, page
from sglang_dspark.evaluation.analyses import (
    curves,
    limits,
    overhead,
    positions,
    registry,
    reliability,
    roc,
    series,
    tau,
    thresholds,
    traffic,
    trainings,
)
from sglang_dspark.evaluation.analyses.analysis import Result
from sglang_dspark.evaluation.resampling import Estimate
from tests.evaluation.trace_world import (
    SETTINGS,
    drawn,
    generation,
    step,
    sts_file,
    thrice,
    trace,
)

RESULTS = Path(__file__).parents[2] / "results"
LABELS = {  # of the first panel's y axis and the last one's x axis: no two analyses draw the same
    "tau": ("tau", ""),
    "trainings": ("tau, mean of trainings", ""),
    "positions": ("accepted, given drafts 1..k-1", "draft position k"),
    "depth": ("tau", "drafter layers"),
    "length": ("tau", "proposal length gamma"),
    "overhead": ("% of a round of 8", "tokens of context"),
    "thresholds": ("", "threshold on survival"),
    "roc": ("of accepted drafts", "of rejected drafts"),
    "reliability": ("share accepted", "predicted survival"),
    "traffic": ("ECE of survival, %", ""),
    "curves": ("held-out tau", "training step"),
    "limits": ("%", "draft position k"),
}


def _overhead() -> overhead.OverheadResult:
    share, bounded = (0.02, 0.0006, 0.03), overhead.BoundedShare(0.02, 0.0006, 0.03, 0.02, 0.04)
    row = overhead.Timed(
        label="dspark",
        gamma=5,
        head="vanilla",
        drafter=drawn(prompts=1).drafter,
        engine=overhead.EngineShare(8, 20, overhead.Share(*share), overhead.Share(*share)),
        direct=tuple(overhead.DirectShare(8, n, 30, bounded, bounded) for n in (9, 99)),
    )
    return overhead.OverheadResult("t", SETTINGS, (row,))


def _traffic() -> traffic.TrafficResult:
    part = traffic.Window(0.02, 0.4, 0.38, 0.9, Estimate(1.1, 1.0, 1.2))
    windows = {name: dict.fromkeys(traffic.WINDOWS, part) for name in traffic.VARIANTS}
    return traffic.TrafficResult(
        "t",
        SETTINGS,
        "dspark",
        drawn(prompts=1).drafter,
        "d",
        {"math": 4, "chat": 4},
        8,
        9,
        windows,
    )


def _curves() -> curves.CurvesResult:
    points = (curves.Point(500, 1.5, 2.0, 0.1), curves.Point(1000, 1.75, 1.9))
    run = curves.Run("dspark", 3, "vanilla", "c0ffee", "t", "ab", 9, 4, 6, points)
    runs = {"dspark": run, "short": replace(run, points=points[:1])}
    return curves.CurvesResult("t", {"temperature": 1.0, "teacher_forced": True}, runs)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """One of each analysis, as it comes back from its file."""
    one, other = drawn(prompts=4), drawn(prompts=4, layers=1)
    found = [
        tau.compute({"dspark": one, "dflash": other}),
        trainings.compute(thrice(dspark=one, dflash=other)),
        positions.compute({"dspark": one, "dflash": other}),
        series.compute(series.DepthResult, [("dspark", one), ("dspark", other)], "a note"),
        series.compute(series.LengthResult, [("a", drawn(prompts=4, gamma=2)), ("a", one)]),
        thresholds.compute({"dspark": one}, points=8),
        roc.compute({"dspark": one, "dflash": other}),
        limits.compute({"dspark": one, "dflash": other}, frozenset({0, 1})),
        _curves(),
        reliability.compute("dspark", one, sts_file(4)),
        _overhead(),
        _traffic(),
    ]
    return {each.analysis: registry.read(json.loads(json.dumps(each.to_json()))) for each in found}


def _file(result: Result) -> dict[str, Any]:
    return {
        "name": f"drafters_{result.analysis}", "command": "dspark eval <b>", "commit": "c0ffee",
        "device": "cpu", "date": "2026-11-21", "metrics": result.to_json(),
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted(RESULTS.glob("drafters_*.json")), ids=lambda p: p.stem)
def test_published_results_are_read_and_written_as_they_stand(path: Path) -> None:
    metrics = json.loads(path.read_text())["metrics"]
    assert registry.read(metrics).to_json() == metrics


def test_unknown_numbers_are_null_in_the_file(results: dict[str, Result]) -> None:
    """A draft position that no step reached has no chance."""
    never = trace([generation(step(0, (0.5, 0.5)))], ["math"], 2)
    found = positions.compute({"d": never})
    assert math.isnan(found.curves["d"]["math"][1].value)
    written = found.to_json()
    assert written["curves"]["d"]["math"][1] == {
        "value": None, "low": None, "high": None, "reached": 0
    }  # fmt: skip
    again = registry.read(written)
    assert isinstance(again, positions.PositionsResult)
    assert math.isnan(again.curves["d"]["math"][1].value)
    for each in (again, *results.values()):
        assert registry.read(each.to_json()).to_json() == each.to_json(), each.analysis


@pytest.mark.parametrize("name", LABELS)
def test_every_analysis_has_a_figure_and_a_table(
    name: str, results: dict[str, Result], tmp_path: Path
) -> None:
    figure = figures.draw(results[name])
    assert (figure.axes[0].get_ylabel(), figure.axes[-1].get_xlabel()) == LABELS[name]
    written = figures.save(figure, tmp_path / "figures" / name)
    png, svg = (path.read_bytes() for path in written)
    assert png.startswith(b"\x89PNG")
    assert b"</svg>" in svg
    assert len(list((tmp_path / "figures").iterdir())) == 2, "no temporary file is left"
    for table in registry.ANALYSES[name].page_tables(results[name]):
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.head)}


def test_every_registered_analysis_is_shown(results: dict[str, Result]) -> None:
    assert set(registry.ANALYSES) == set(LABELS) == set(results)
    captions = {each: figures.caption(result) for each, result in results.items()}
    assert len({each.caption for each in registry.ANALYSES.values()}) == len(captions)
    for name, analysis in registry.ANALYSES.items():
        assert captions[name].startswith(analysis.caption)
    assert captions["depth"].endswith("(t, greedy, a note)")


def test_same_numbers_give_the_same_bytes(results: dict[str, Result], tmp_path: Path) -> None:
    first, second = (
        figures.save(figures.draw(results["overhead"]), tmp_path / name) for name in ("a", "b")
    )
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_seven_drafters_have_seven_colours(results: dict[str, Result]) -> None:
    one = results["tau"]
    assert isinstance(one, tau.TauResult)
    labels = [f"drafter {i}" for i in range(7)]
    many = replace(
        one,
        tau=dict.fromkeys(labels, one.tau["dspark"]),
        interval=dict.fromkeys(labels, one.interval["dspark"]),
    )
    (axes,) = figures.draw(many).axes
    bars = [each for each in axes.containers if hasattr(each, "patches")]
    assert len({bar.patches[0].get_facecolor() for bar in bars}) == len(labels)


def test_eight_drafters_have_a_row_each(results: dict[str, Result]) -> None:
    one = results["tau"]
    assert isinstance(one, tau.TauResult)
    others = [f"drafter {i}" for i in range(7)]
    labels = ["base", *others]
    # The base over each other: 0.8 (0.5 to 1.25), so the other is 25% more (-20 to +100).
    less = {"macro": Estimate(0.8, 0.5, 1.25)}
    many = replace(
        one,
        tau=dict.fromkeys(labels, one.tau["dspark"]),
        interval=dict.fromkeys(labels, one.interval["dspark"]),
        ratio={f"base/{each}": less for each in others},
    )
    (axes,) = figures.draw(many).axes
    assert [each.get_text() for each in axes.get_yticklabels()] == others
    ((points, _, (lines,)),) = axes.containers
    assert points.get_xdata() == pytest.approx([25.0] * 7)
    assert lines.get_segments()[0][:, 0] == pytest.approx([-20.0, 100.0])


@pytest.mark.parametrize("name", ["tau", "trainings", "reliability", "overhead", "traffic"])
def test_the_terminal_shows_what_was_found(name: str, results: dict[str, Result]) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    table = registry.ANALYSES[name].table
    assert table is not None
    for each in table(results[name]):
        console.print(each)
    expected = {
        "tau": ["dspark", "dspark/dflash", "macro"],
        "trainings": ["dspark", "dspark/dflash", "trainings", "prompts", "macro"],
        "reliability": ["dspark: 4 held-out prompts", "raw: ECE", "STS+shift: ECE", "overall"],
        "overhead": ["dspark: 3.00% of a round in the engine (wall), 3.00% at context 9, 3.00% at"],
        "traffic": [
            "dspark: math, then chat, 8 at a time",
            "+10.0% (+0.0 to +20.0)",
            "chat, later",
        ],
    }[name]
    shown = console.export_text()
    assert all(text in shown for text in expected), shown


def _write(folder: Path, results: dict[str, Result]) -> None:
    for name, each in results.items():
        (folder / f"drafters_{name}.json").write_text(json.dumps(_file(each)))


def test_page_is_self_contained(results: dict[str, Result], tmp_path: Path) -> None:
    _write(tmp_path, results)
    found = page.read_results(tmp_path)
    assert [each.result.analysis for each in found] == list(registry.ANALYSES)
    html = page.render(found[::4], "Drafters")
    assert len(re.findall('src="data:image/svg', html)) == len(found[::4])
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert "dspark eval &lt;b&gt;" in html, "text is escaped"
    assert "c0ffee" in html
    pictures = re.findall('base64,([^"]+)', html)
    assert all(b"</svg>" in base64.b64decode(picture) for picture in pictures)


def test_summary_has_the_keys_that_others_read(results: dict[str, Result], tmp_path: Path) -> None:
    _write(tmp_path, results)
    summary = page.drafter_summary(page.read_results(tmp_path))
    assert set(summary["tau"]["dspark"]) == {"math", "chat", "macro"}
    assert set(summary["ece_before"]) == set(summary["ece_after"]) == {"math", "chat", "overall"}
    assert 0.5 < summary["auc"] < 1
    assert summary["sequential_share"] == 0.03


def test_summary_of_the_published_results_is_published() -> None:
    known = json.loads((RESULTS / "drafters.json").read_text())["metrics"]
    assert page.drafter_summary(page.read_results(RESULTS)) == known


def test_committed_results_redraw() -> None:
    """`dspark report --drafters` reads every published drafters_*.json and draws each of them."""
    found = page.read_results(RESULTS)
    assert {each.stem for each in found} == {p.stem for p in RESULTS.glob("drafters_*.json")}
    for each in found:
        assert {"name", "command", "commit", "device", "date"} <= set(each.document)
        assert figures.draw(each.result).axes, each.stem
        tables = registry.of(each.result).page_tables(each.result)
        assert all(table.rows for table in tables), each.stem


@pytest.mark.parametrize(
    ("stem", "panels"), [("drafters_positions", 8), ("drafters_narrow_positions", 2)]
)
def test_one_domain_is_one_column_below_its_whole_title(stem: str, panels: int) -> None:
    """Overall and the only domain are the same curves, and a narrow figure needs more lines."""
    found = {each.stem: each.result for each in page.read_results(RESULTS)}
    figure = figures.draw(found[stem])
    assert len(figure.axes) == panels
    (title,) = [each for each in figure.texts if each.get_text() == figures.caption(found[stem])]
    assert title.get_window_extent().x1 <= figure.bbox.x1


def test_results_that_are_none_are_named(results: dict[str, Result], tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="no drafters_"):
        page.read_results(tmp_path)
    path = tmp_path / "drafters_x.json"
    path.write_text('{"metrics": {"analysis": "zodiac"}}')
    with pytest.raises(DSparkError, match=r"drafters_x\.json is no result.*no analysis 'zodiac'"):
        page.read_results(tmp_path)
    document = _file(results["tau"])
    del document["metrics"]["interval"]
    path.write_text(json.dumps(document))
    with pytest.raises(DSparkError, match=r"drafters_x\.json is no result.*interval") as caught:
        page.read_results(tmp_path)
    assert "\n" not in str(caught.value)
