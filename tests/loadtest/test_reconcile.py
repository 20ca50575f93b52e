"""Totals of client and server: counters written by the library that SGLang writes them with."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.records import Outcome, Record
from sglang_dspark.loadtest.sweep.reconcile import (
    ServerTotals,
    disagreements,
    parse_totals,
)

BEFORE = ServerTotals(5, 100, 1000)


def record(index: int, tokens: int, outcome: Outcome = "ok") -> Record:
    return Record(
        index, "p", "math", outcome, None, 0.0, 1.0, at=(0.5,), tokens=(tokens,), prompt_tokens=10
    )


def page(**counts: tuple[float, float]) -> str:
    registry = CollectorRegistry()
    for name, values in counts.items():
        counter = Counter(f"sglang:{name}", "help", ["engine"], registry=registry)
        for engine, value in enumerate(values):
            counter.labels(str(engine)).inc(value)
    return generate_latest(registry).decode()


def test_counters_are_summed_over_their_labels() -> None:
    text = page(num_requests_total=(3, 4), generation_tokens_total=(50, 1), prompt_tokens=(7, 0))
    assert parse_totals(text) == ServerTotals(7, 51, 7)


def test_a_counter_not_yet_touched_is_zero() -> None:
    assert parse_totals(page(prompt_tokens=(7, 0))) == ServerTotals(0, 0, 7)


@pytest.mark.parametrize("text", ["", "# HELP x y\nx 3\n"])
def test_a_server_without_metrics_is_reported(text: str) -> None:
    with pytest.raises(DSparkError, match="--enable-metrics"):
        parse_totals(text)


def test_equal_totals_agree() -> None:
    records = [record(0, 30), record(1, 70), record(2, 0, "unsent")]
    assert disagreements(records, BEFORE, ServerTotals(7, 200, 1020)) == []


@pytest.mark.parametrize(
    ("after", "named"),
    [
        (ServerTotals(8, 200, 1020), "requests: the server counted 3, the client 2"),
        (ServerTotals(7, 199, 1020), "generated tokens: the server counted 99, the client 100"),
        (ServerTotals(7, 202, 1020), "generated tokens: the server counted 102"),
        (ServerTotals(7, 200, 1000), "prompt tokens: the server counted 0, the client 20"),
    ],
)
def test_every_difference_is_said(after: ServerTotals, named: str) -> None:
    (said,) = disagreements([record(0, 30), record(1, 70)], BEFORE, after)
    assert said.startswith(named)


def test_a_cut_answer_leaves_room_above_but_none_below() -> None:
    records = [record(0, 30), record(1, 5, "cut")]
    assert disagreements(records, BEFORE, ServerTotals(6, 130, 1010)) == []
    assert disagreements(records, BEFORE, ServerTotals(7, 180, 1020)) == []
    assert disagreements(records, BEFORE, ServerTotals(8, 180, 1020)) != []
    assert disagreements(records, BEFORE, ServerTotals(6, 120, 1010)) != []
