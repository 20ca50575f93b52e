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
