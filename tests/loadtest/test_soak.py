"""The soak's load and its judgements: growth, drift and accounts that do not add up are found."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import evaluation_prompts
from sglang_dspark.loadtest.bench.soak import (
    BLOCKS,
    Books,
    Drift,
    Memory,
    Soak,
    drift_of,
    memory_of,
    outcomes_of,
)
from sglang_dspark.loadtest.bench.soak_load import WAYS, SoakLoad, capacity_plan, soak_plan
from sglang_dspark.loadtest.bench.soak_run import _flush, books
from sglang_dspark.loadtest.client.cell import CellPlan
from sglang_dspark.loadtest.client.metrics import SpecStats
from sglang_dspark.loadtest.client.records import Record
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec

LOAD = SoakLoad(rate=3.0, seconds=900.0, seed=5)
BOOKS = Books(1000, 950, 60, 0, 0, 0, (), alive=True)


@pytest.fixture(scope="module")
def plan() -> CellPlan:
    return soak_plan(LOAD, evaluation_prompts(), lambda prompt: "\n\n".join(prompt.turns))


def test_the_load_is_as_high_as_was_asked(plan: CellPlan) -> None:
    arrivals = plan.schedule.arrivals
    assert len(arrivals) == pytest.approx(LOAD.rate * LOAD.seconds, rel=0.01)
    times = np.array([arrival.at for arrival in arrivals])
    assert (np.diff(times) >= 0).all()
    assert times[-1] < LOAD.seconds
    sizes = Counter(times.tolist())
    bursts = [count for count in sizes.values() if count > 1]
    assert bursts == [LOAD.burst_size] * 15  # a minute each
    assert sum(bursts) / len(arrivals) == pytest.approx(0.2, abs=0.02)


def test_thirds_are_alike_and_no_text_comes_twice(plan: CellPlan) -> None:
    third = len(plan.schedule.arrivals) // 3
    for one, other in zip(plan.schedule.arrivals, plan.schedule.arrivals[third:], strict=False):
        assert one.at is not None
        assert other.at == pytest.approx(one.at + LOAD.third_s)
        assert other.max_new_tokens == one.max_new_tokens
        first, later = plan.prompts[one.prompt], plan.prompts[other.prompt]
        assert (later.ends, later.ends_after) == (first.ends, first.ends_after)
        unlike = {"rid"}
        assert {k: v for k, v in later.extra.items() if k not in unlike} == {
            k: v for k, v in first.extra.items() if k not in unlike
        }
    assert plan.repeats == 0


def test_requests_are_asked_in_all_ways_and_broken_off(plan: CellPlan) -> None:
    ends = Counter(prompt.ends for prompt in plan.prompts)
    assert 0.03 < ends["abort"] / len(plan.prompts) < 0.07
    assert 0.03 < ends["leave"] / len(plan.prompts) < 0.07
    ways = Counter(
        str(sorted((k, v) for k, v in prompt.extra.items() if k != "rid"))
        for prompt in plan.prompts
    )
    assert len(ways) == len(WAYS)
    rids = [prompt.extra["rid"] for prompt in plan.prompts if prompt.ends]
    assert len(set(rids)) == len(rids)
    assert all(prompt.extra.get("n", 1) == 1 for prompt in plan.prompts if prompt.ends)
    assert {prompt.domain for prompt in plan.prompts} == {"math", "code", "chat"}


def test_the_capacity_is_measured_on_whole_answers() -> None:
    plan = capacity_plan(8, 48, evaluation_prompts(), lambda prompt: prompt.turns[0])
    assert plan.schedule.users == 8
    assert {prompt.ends for prompt in plan.prompts} == {""}
    assert not any("rid" in prompt.extra for prompt in plan.prompts)  # the loop runs twice
    with pytest.raises(DSparkError, match="a soak needs a load"):
        SoakLoad(rate=3.0, seconds=10.0, seed=0)


def memory_with(slope: float, minutes: float = 30.0, noise: float = 1.0) -> tuple[bool, float]:
    """Return whether growth by `slope` MiB a minute is found, after a start that fills caches."""
    at = np.linspace(0, 60 * minutes, 240)
    warm_up = 200 * (1 - np.exp(-at / (6 * minutes)))
    mib = 3000 + warm_up + slope * at / 60 + noise * np.random.default_rng(1).standard_normal(240)
    found = memory_of("scheduler 1", at.tolist(), mib.tolist())
    return found.grows, found.slope


def test_growth_is_found_and_noise_is_not() -> None:
    assert memory_with(0.0)[0] is False
    grows, slope = memory_with(2.0)
    assert grows
    assert slope == pytest.approx(2.0, abs=0.3)
    assert memory_with(-2.0)[0] is False
    assert memory_with(2.0, minutes=1.0)[0] is False  # too short to judge
    assert math.isnan(memory_of("gone 2", [], []).slope)
    unsure = Memory("scheduler 1", 120, 900.0, 912.0, 0.6, 0.2, 1.1, judged=True)
    assert not unsure.grows
    assert replace(unsure, low=0.51).grows


@pytest.mark.parametrize(
    ("low", "high", "judged", "settled"),
    [
        (-0.1, 0.4, True, True),
        (0.6, 0.9, True, True),
        (0.4, 0.9, True, False),  # contains the limit
        (-0.1, 0.4, False, False),  # too short
    ],
)
def test_growth_is_settled_where_the_limit_is_outside(
    low: float, high: float, judged: bool, settled: bool
) -> None:
    assert Memory("p", 9, 1.0, 2.0, (low + high) / 2, low, high, judged).settled is settled


def records_with(slowed: float) -> list[Record]:
    """A load of equal thirds whose last one is slower by that factor, and noise."""
    generator = np.random.default_rng(2)
    third = SoakLoad(rate=6.0, seconds=900.0, seed=5).times()
    found = []
    for number in range(3):
        for at in third:
            due = number * LOAD.third_s + at
            seconds = 1.0 + 0.02 * generator.standard_normal() + 0.5 * (generator.random() < 0.05)
            seconds *= slowed if number == 2 else 1.0
            found.append(
                Record(len(found), "", "math", "ok", due, due, due + seconds,
                       (due + seconds / 4, due + seconds), (1, 9))
            )  # fmt: skip
    return found


@cache
def drift_with(slowed: float) -> tuple[Drift, ...]:
    """Judge that load; some seconds of resampling."""
    return tuple(drift_of(LOAD, records_with(slowed)))


def test_a_slower_last_third_is_found() -> None:
    even = {drift.latency: drift for drift in drift_with(1.0)}
    assert set(even) == {"ttft", "tpot", "whole answer"}
    for drift in even.values():
        assert drift.low <= 1.0 <= drift.high
        assert not drift.slower
    for drift in drift_with(1.5):
        assert drift.slower
        assert drift.ratio == pytest.approx(1.5, rel=0.05)
    (faster, *_) = drift_with(0.7)
    assert faster.held
    few = [record for record in records_with(1.0) if record.due < LOAD.third_s / BLOCKS]
    assert drift_of(LOAD, few) == []


@pytest.mark.parametrize("last", [True, False])
def test_the_interval_of_a_drift_by_hand(last: bool) -> None:
    """Of one third's ten blocks block b waits 1 + b / 10 s, the other third 1 s throughout. The p99
    of a resample is its slowest block: it is one of the first seven with chance 0.7^10 = 2.8%, so
    a 95% interval begins or ends there; a 90% one at the eighth, for 0.8^10 = 11%."""
    records: list[Record] = []
    for third in (0, 2):
        for number in range(20 * BLOCKS):
            due = third * LOAD.third_s + (number + 0.5) * LOAD.third_s / (20 * BLOCKS)
            wait = 1 + number // 20 / 10 if last == (third == 2) else 1.0
            at = (due + wait, due + 2.0 * wait)
            records.append(
                Record(len(records), "", "math", "ok", due, due, at[-1], at=at, tokens=(1, 9))
            )
    for found in drift_of(LOAD, records):
        bounds = (found.low, found.high) if last else (1 / found.high, 1 / found.low)
        assert bounds == pytest.approx((1.6, 1.9)), found.latency
        assert (found.ratio if last else 1 / found.ratio) == pytest.approx(1.9)


def test_the_interval_of_growth_by_hand() -> None:
    """Ten sizes t^3 MiB at t = 0..9 min of the second half: slopes i^2 + ij + j^2 of 45 pairs. The
    variance of Kendall's S is 10 * 9 * 25 / 18 = 125, and (45 - 1.96 * 11.18) / 2 = 11.5: a 95%
    interval ends at the 12th slope from either end; a 90% one would at the 13th (13.3)."""
    minutes = np.array([0.0, *range(10, 20)])
    found = memory_of("scheduler 1", (60 * minutes).tolist(), ((minutes - 10) ** 3).tolist())
    slopes = sorted(i * i + i * j + j * j for j in range(10) for i in range(j))
    assert (found.low, found.high) == pytest.approx((slopes[11], slopes[-12]))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ""),
        ({"generated": 949}, "949 tokens"),
        ({"generated": 1011}, "1011 tokens"),
        ({"used_tokens": 1}, "1 tokens of the pool"),
        ({"running": 2}, "2 requests run"),
        ({"waiting": 3}, "3 wait"),
        ({"alive": False}, "does not answer"),
        ({"complaints": ("pool memory leak detected!",)}, "leak"),
    ],
)
def test_accounts_add_up(fields: dict[str, object], said: str) -> None:
    faults = replace(BOOKS, **fields).faults()  # type: ignore[arg-type]
    assert len(faults) == bool(said)
    assert said in "".join(faults)


def answers_until(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A server at rest that is dead when that path is asked."""
    loads = {"num_used_tokens": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}
    name = "sglang:generation_tokens_total"
    metrics = f'# TYPE {name} counter\n{name}{{m="x"}} 40.0\n'
    told = {
        "/flush_cache": httpx.Response(200),
        "/v1/loads": httpx.Response(200, json={"loads": [loads]}),
        "/metrics": httpx.Response(200, text=metrics),
        "/health_generate": httpx.Response(200),
    }

    def tell(request: httpx.Request) -> httpx.Response:
        if request.url.path == path:
            raise httpx.ReadError("")
        return told[request.url.path]

    whole = httpx.Client.__init__

    def planted(client: httpx.Client, **options: Any) -> None:
        whole(client, transport=httpx.MockTransport(tell), **options)

    monkeypatch.setattr(httpx.Client, "__init__", planted)


@pytest.mark.parametrize("path", ["", "/flush_cache", "/v1/loads", "/metrics", "/health_generate"])
def test_a_server_that_died_at_the_end_costs_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: CellPlan, path: str
) -> None:
    server = ServerProcess(ServerSpec("dspark", Path("m"), 1), tmp_path)
    server.log_path.write_text("a line\nmemory leak detected\n")
    answers_until(monkeypatch, path)
    kept = books(server, plan, records_with(1.0)[:2], before=20)
    assert (kept.alive, kept.received) == (not path, 20)
    assert kept.generated == (None if path in ("/flush_cache", "/v1/loads", "/metrics") else 20)
    assert kept.used_tokens == (None if path in ("/flush_cache", "/v1/loads") else 0)
    said = ["the server does not answer", "its accounts cannot be had"] if path else []
    for fault, words in zip(kept.faults(), [*said, "memory leak"], strict=True):
        assert words in fault


def test_a_cache_that_cannot_be_emptied_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers_until(monkeypatch, "/flush_cache")
    with pytest.raises(DSparkError, match=r"/flush_cache does not answer \(ReadError\); see .*log"):
        _flush(ServerProcess(ServerSpec("dspark", Path("m"), 1), tmp_path))


def soak_with(records: list[Record], slope: float = 0.0, slowed: float = 1.0) -> Soak:
    at = np.linspace(0, 900, 200)
    mib = (1000 + slope * at / 60).tolist()
    return Soak(
        load=LOAD,
        capacity=200.0,
        share=0.8,
        outcomes=outcomes_of(records),
        ways=len(WAYS),
        tokens=10 * len(records),
        spec=SpecStats(steps=10, accepted=14, histogram=(3, 0, 7)),
        memory=(memory_of("scheduler 1", at.tolist(), mib),),
        drift=drift_with(slowed),
        books=BOOKS,
    )


def test_a_soak_names_what_is_wrong() -> None:
    good = records_with(1.0)
    assert soak_with(good).faults() == []
    intended = [replace(good[0], outcome="aborted"), replace(good[1], outcome="left"), *good[2:]]
    assert soak_with(intended).faults() == []
    (fault,) = soak_with([replace(good[0], outcome="cut"), *good[1:]]).faults()
    assert fault == "1 requests ended as cut"
    (fault,) = soak_with(good, slope=3.0).faults()
    assert fault.startswith("scheduler 1 grows by 3.00")
    assert len(soak_with(good, slowed=1.5).faults()) == 3
    metrics = soak_with(good).as_metrics()
    assert metrics["outcomes"] == {"ok": len(good)}
    assert metrics["memory"][0]["grows"] is False
    assert metrics["faults"] == []
    assert (metrics["tau"], metrics["accepted_drafts"]) == (2.4, 14)


def test_an_interval_that_holds_the_limit_settles_nothing() -> None:
    unsure = Drift("ttft", 1.0, 1.04, 1.04, 0.9, 1.2)
    assert (unsure.held, unsure.slower) == (False, False)
