"""Tables of `dspark bench` on pages: their figures are those of the results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from sglang_dspark.errors import DSparkError
from tools.docs import bench


@pytest.mark.parametrize("table", bench.TABLES, ids=lambda table: table.mark)
def test_the_page_is_the_results(table: bench.Table) -> None:
    page = table.page.read_text()
    assert table.rewrite(page) == page, "run `python -m tools.docs.bench`"


def speed(metrics: Any) -> None:
    metrics["by_concurrency"][0]["dspark"] += 1


def ratio(metrics: Any) -> None:
    metrics["by_concurrency"][-1]["over_best_fixed"]["low"] -= 0.01


def whole(metrics: Any) -> None:
    metrics["by_concurrency"][1]["whole_round_speedup_ci95"][1] += 0.01


def arm(metrics: Any) -> None:
    next(each for each in metrics["arms"] if each["arm"] == "llama.cpp q4_0")["tokens_per_s"] += 1


def decode(metrics: Any) -> None:
    pair = ("dspark-int8", "llama.cpp q8_0")
    ratios = metrics["ratios"]
    next(each for each in ratios if (each["arm"], each["over"]) == pair)["decode"] += 0.01


@pytest.mark.parametrize(
    ("mark", "source", "change"),
    [
        ("gammas", 0, speed),
        ("gammas", 0, ratio),
        ("more gammas", 0, ratio),
        ("more gammas", 1, ratio),
        ("serve", 0, whole),
        ("formats", 0, arm),
        ("llama", 0, decode),
        ("llama", 1, decode),
        ("llama", 2, decode),
    ],
)
def test_another_result_is_another_page(
    mark: str, source: int, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = next(each for each in bench.TABLES if each.mark == mark)
    changed = table.sources[source]
    read = bench.result

    def result(name: str) -> Any:
        found = copy.deepcopy(read(name))
        if name == changed:
            change(found["metrics"])
        return found

    monkeypatch.setattr(bench, "result", result)
    page = table.page.read_text()
    assert table.rewrite(page) != page


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(DSparkError, match="gammas: begin"):
        bench.TABLES[0].rewrite("no table")


SOURCE = {"command": "c", "commit": "0123456789", "date": "2026-01-02T03", "device": "d"}


def document(name: str, **metrics: Any) -> dict[str, Any]:
    return {**SOURCE, "name": name, "metrics": metrics}


def interval(mid: float, **more: Any) -> dict[str, Any]:
    return {"low": mid - 0.01, "mid": mid, "high": mid + 0.02, "trials": 3, **more}


def test_each_figure_is_in_its_column() -> None:
    row = {"concurrency": 4, "plain": 10.0, "fixed": {"1": 11.0, "5": 12.0}, "best_fixed": "5",
           "dspark": 13.0, "over_plain": interval(1.3), "over_best_fixed": interval(1.1),
           "speedup": 1.5, "speedup_ci95": [1.4, 1.6], "whole_round_speedup": 1.2,
           "whole_round_speedup_ci95": [1.1, 1.25]}  # fmt: skip
    run = document("run", by_concurrency=[row])
    assert (
        "| 4 | 10.0 | 12.0 (5) | 13.0 | 1.30 (1.29 to 1.32) | 1.10 (1.09 to 1.12) |"
    ) in bench.gammas(run)
    more = list(bench.more_gammas(run, document("few", by_concurrency=[row])))
    shown = "| 4 | 1.30 (1.29 to 1.32) | 1.10 (1.09 to 1.12) | 3 |"
    assert more[2:4] == [
        f"| [many users](../results/run.json) {shown}",
        f"| [few users](../results/few.json) {shown}",
    ]
    assert "| 4 | 1.50 (1.40 to 1.60) | 1.20 (1.10 to 1.25) |" in bench.serve(run)


def test_each_ratio_over_llama_is_in_its_column() -> None:
    ratios = [
        {"arm": arm, "over": f"llama.cpp {kind}", "whole": base + 0.2, "decode": base,
         "whole_ci95": [base, base + 0.3], "decode_ci95": [base - 0.1, base + 0.1]}
        for arm, kind, base in (
            ("dspark-int8", "q8_0", 1.5), ("dspark-int8", "q4_0", 1.2), ("plain-int8", "q8_0", 9.0)
        )
    ]  # fmt: skip
    runs = [document(name, ratios=ratios, repeats=7) for name in ("one", "two", "three")]
    rows = [line for line in bench.over_llama(*runs) if line.startswith("| int8 alone, two")]
    assert rows == [
        "| int8 alone, two threads on two cores, 7 repeats, commit 0123456 | 1.70 (1.50 to 1.80) | "
        "1.50 (1.40 to 1.60) | 1.40 (1.20 to 1.50) | 1.20 (1.10 to 1.30) | "
        "[results](../results/three.json) |"
    ]
