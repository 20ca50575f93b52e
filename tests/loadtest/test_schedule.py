"""Test arrival schedules: their distributions, the same load for every arm, bad input named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.schedule import (
    Arrivals,
    Bursts,
    ClosedLoop,
    Gamma,
    Lengths,
    Poisson,
    Ramp,
    Schedule,
    Trace,
    make_schedule,
    parse_arrivals,
)

SINGLES = [[i] for i in range(10)]
LENGTHS = Lengths(low=8, high=32)
MANY = 20_000


def times(arrivals: Arrivals, seed: int = 0) -> np.ndarray:
    schedule = make_schedule(arrivals, SINGLES, LENGTHS, seed)
    return np.array([arrival.at for arrival in schedule.arrivals], dtype=np.float64)


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (Poisson(rate=5, requests=MANY), 1.0),
        (Gamma(rate=5, cv=2.0, requests=MANY), 2.0),
        (Gamma(rate=5, cv=0.3, requests=MANY), 0.3),
    ],
)
def test_gaps_have_the_rate_and_spread_asked_for(arrivals: Arrivals, cv: float) -> None:
    gaps = np.diff(times(arrivals), prepend=0.0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=5 * cv / np.sqrt(MANY))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


def test_poisson_gaps_are_memoryless() -> None:
    gaps = np.diff(times(Poisson(rate=1, requests=MANY)), prepend=0.0)
    assert (gaps > 1).mean() == pytest.approx(np.exp(-1), abs=0.015)
    assert (gaps > 2).sum() / (gaps > 1).sum() == pytest.approx(np.exp(-1), abs=0.025)


@pytest.mark.parametrize(("start", "end"), [(0, 100), (100, 0), (30, 90), (50, 50)])
def test_a_ramp_grows_as_its_rate(start: float, end: float) -> None:
    at = times(Ramp(from_rate=start, to_rate=end, seconds=200))
    assert (np.diff(at) >= 0).all()
    assert at[0] >= 0
    assert at[-1] <= 200 + 1e-9
    total = (start + end) / 2 * 200
    assert len(at) == pytest.approx(total, abs=5 * np.sqrt(total))
    half = (start + (start + end) / 2) / 2 * 100  # expected in the first half
    assert (at < 100).sum() == pytest.approx(half, abs=5 * np.sqrt(half))


def test_a_ramp_to_nothing_thins_out_towards_its_end() -> None:
    at = times(Ramp(from_rate=0.5, to_rate=0, seconds=4000))  # 1000 requests
    assert (at < 2000).mean() == pytest.approx(0.75, abs=0.06)
    assert (at > 3000).mean() == pytest.approx(1 / 16, abs=0.03)


def test_a_ramp_sends_at_least_one_request() -> None:
    assert len(times(Ramp(from_rate=0, to_rate=1e-9, seconds=1))) == 1


def test_bursts() -> None:
    assert times(Bursts(size=3, every_s=2, count=2)).tolist() == [0, 0, 0, 2, 2, 2]


def test_a_trace_is_replayed_from_its_first_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 104}\n\n{"at": 100}\n{"at": 101}\n')
    assert times(Trace(path=path, speed=2)).tolist() == [0, 0.5, 2]
    assert times(Trace(path=path, requests=2)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no arrivals"), ('{"at": 1}\n{"t": 2}', "line 2"), ("[1]", "line 1"), ("NaN", "line 1")],
)
def test_a_bad_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(DSparkError, match=message):
        times(Trace(path=path))
    with pytest.raises(DSparkError, match=r"absent\.jsonl"):
        times(Trace(path=tmp_path / "absent.jsonl"))


@given(seed=st.integers(0, 2**31), short=st.integers(1, 40), more=st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_the_seed_alone_decides_and_a_longer_cell_begins_as_a_shorter(
    seed: int, short: int, more: int
) -> None:
    def make(requests: int) -> Schedule:
        return make_schedule(Poisson(rate=3, requests=requests), SINGLES, LENGTHS, seed)

    assert make(short) == make(short)
    assert make(short).fingerprint() == make(short).fingerprint()
    assert make(short + more).arrivals[:short] == make(short).arrivals
    assert {LENGTHS.low <= a.max_new_tokens <= LENGTHS.high for a in make(short).arrivals} == {True}


def test_another_seed_is_another_load() -> None:
    a, b = (make_schedule(Poisson(rate=3, requests=9), SINGLES, LENGTHS, s) for s in (1, 2))
    assert a.fingerprint() != b.fingerprint()


def test_every_prompt_once_before_any_again() -> None:
    schedule = make_schedule(ClosedLoop(users=4, requests=30), SINGLES, LENGTHS, 0)
    prompts = [arrival.prompt for arrival in schedule.arrivals]
    assert {arrival.at for arrival in schedule.arrivals} == {None}
    assert schedule.users == 4
    for third in (prompts[:10], prompts[10:20], prompts[20:]):
        assert sorted(third) == list(range(10))
    assert prompts[:10] != prompts[10:20]


def test_turns_keep_their_order_and_are_spread() -> None:
    groups = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(20)]
    schedule = make_schedule(ClosedLoop(users=4, requests=60), groups, LENGTHS, 0)
    place = {arrival.prompt: arrival.index for arrival in schedule.arrivals}
    for first, second, third in groups:
        assert place[first] < place[second] < place[third]
        assert place[second] - place[first] >= 4  # 20 groups: lanes of 8, 8 and 4


def test_workers_share_a_schedule_out() -> None:
    schedule = make_schedule(Poisson(rate=3, requests=10), SINGLES, LENGTHS, 0)
    shares = [schedule.share(worker, 3) for worker in range(3)]
    assert sorted((a for share in shares for a in share), key=lambda a: a.index) == list(
        schedule.arrivals
    )
    with pytest.raises(ValueError, match="worker 3 of 3"):
        schedule.share(3, 3)


def test_configuration_is_checked_at_the_edge() -> None:
    assert parse_arrivals({"kind": "closed", "users": 2, "requests": 4}) == ClosedLoop(
        users=2, requests=4
    )
    bad: list[tuple[object, str]] = [
        ({"kind": "closed", "users": 0, "requests": 4}, "closed.users"),
        ({"kind": "poisson", "rate": float("inf"), "requests": 4}, "poisson.rate"),
        ({"kind": "gamma", "rate": 1, "cv": 0, "requests": 4}, "gamma.cv"),
        ({"kind": "ramp", "from_rate": 0, "to_rate": 0, "seconds": 3}, "no request"),
        ({"kind": "poisson", "rate": 1, "requests": 4, "ratio": 3}, "ratio"),
        ({"kind": "steady"}, "kind"),
        ("closed", "arrivals"),
    ]
    for value, named in bad:
        with pytest.raises(DSparkError, match=named):
            parse_arrivals(value)
    with pytest.raises(DSparkError, match="no prompt"):
        make_schedule(Poisson(rate=1, requests=1), [], LENGTHS, 0)
    with pytest.raises(ValueError, match="above"):
        Lengths(low=9, high=8)
