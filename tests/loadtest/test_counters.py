"""Counters out of a page that prometheus_client has written, as a server's is."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.sweep.counters import parse_counters, totals_of
from sglang_dspark.loadtest.sweep.reconcile import ServerTotals


def page() -> str:
    registry = CollectorRegistry()

    def count(name: str, value: float, **labels: str) -> None:
        counter = counters.get(name)
        if counter is None:
            counter = Counter(name, "x", ("rank", *labels), registry=registry)
            counters[name] = counter
        counter.labels(rank="0", **labels).inc(value)

    counters: dict[str, Counter] = {}
    count("sglang:num_requests", 3)
    count("sglang:generation_tokens", 120)
    count("sglang:prompt_tokens", 90)
    count("sglang:dspark_steps", 7, mode="speculate")
    count("sglang:dspark_steps", 2, mode="plain")
    count("sglang:dspark_draft_skips", 2, reason="drafting does not pay")
    for position, (admitted, accepted) in enumerate([(9, 5), (4, 2), (1, 1)], start=1):
        count("sglang:dspark_admitted_drafts", admitted, position=str(position))
        count("sglang:dspark_accepted_drafts", accepted, position=str(position))
    Gauge("sglang:num_running_reqs", "x", registry=registry).set(4)
    Gauge("sglang:num_queue_reqs", "x", registry=registry).set(2)
    Gauge("sglang:dspark_gain", "x", registry=registry).set(1.25)
    budget = Histogram("sglang:dspark_budget", "x", registry=registry)
    step = Histogram("sglang:dspark_step_seconds", "x", registry=registry)
    predicted = Histogram("sglang:dspark_predicted_step_seconds", "x", registry=registry)
    for value in (3, 5, 6):
        budget.observe(value)
        step.observe(0.02)
        predicted.observe(0.021)
    return generate_latest(registry).decode()


def test_what_is_kept() -> None:
    found = parse_counters(page(), at=1.5)
    assert totals_of(found) == ServerTotals(3, 120, 90)
    assert (found.at, found.running, found.queued, found.gain) == (1.5, 4, 2, 1.25)
    assert found.steps == {"speculate": 7, "plain": 2}
    assert found.skips == {"drafting does not pay": 2}
    assert (found.admitted, found.accepted) == ([9, 4, 1], [5, 2, 1])
    assert (found.budget_sum, found.budget_count) == (14, 3)
    assert found.step_sum == pytest.approx(0.06)
    assert found.predicted_sum == pytest.approx(0.063)


def test_a_gain_of_two_replicas_is_no_sum() -> None:
    registry = CollectorRegistry()
    gain = Gauge("sglang:dspark_gain", "x", ("dp_rank",), registry=registry)
    gain.labels(dp_rank="0").set(1.5)
    gain.labels(dp_rank="1").set(1.0)
    empty = "sglang:num_requests_total 0.0\n"
    assert parse_counters(generate_latest(registry).decode() + empty, at=0.0).gain == 1.25


def test_a_server_that_has_served_nothing() -> None:
    found = parse_counters("# TYPE sglang:token_usage gauge\nsglang:token_usage 0.0\n", at=0.0)
    assert totals_of(found) == ServerTotals(0, 0, 0)
    assert found.admitted == []


def test_a_page_without_our_counters_is_refused() -> None:
    with pytest.raises(DSparkError, match="enable-metrics"):
        parse_counters("process_cpu_seconds_total 1.0\n", at=0.0)
