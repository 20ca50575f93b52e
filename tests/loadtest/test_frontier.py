"""Matched throughput and SLA capacity on arms whose curves are known in closed form."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.measure import measure_cell
from sglang_dspark.loadtest.client.records import Header, Record
from sglang_dspark.loadtest.sweep.frontier import Point, compare_matched, frontier, speed_at
from sglang_dspark.loadtest.sweep.sla import Sla, capacity, next_load

LOADS = (1, 2, 4, 8, 16)


def point(load: float, fast: float = 1.0, wait: float = 0.1) -> Point:
    """An arm whose step takes 10 ms and 1 ms a user: speed 1000 / (10 + users)."""
    speed = fast * 1000 / (10 + load)
    return Point(load, load * speed, speed, 0.8 * speed, wait * load)


def arm(fast: float = 1.0, noise: float = 0.0, seed: int = 0) -> list[Point]:
    generator = np.random.default_rng(seed)
    return [point(load, fast * float(np.exp(generator.normal(0, noise)))) for load in LOADS]


def test_the_frontier_omits_dominated_points() -> None:
    good = arm()
    overloaded = Point(32, 400, 12.5, 10, 9)
    assert frontier([overloaded, *reversed(good)]) == good
    assert frontier([]) == []


@given(
    st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=20),
    st.floats(0, 120),
)
@settings(max_examples=100, deadline=None)
def test_speed_never_grows_with_throughput(pairs: list[tuple[float, float]], asked: float) -> None:
    points = [Point(i + 1, t, s, s, 1) for i, (t, s) in enumerate(pairs)]
    here, more = speed_at(points, asked), speed_at(points, asked + 1)
    if here is None:
        assert more is None
        assert asked > max(t for t, _ in pairs)
    elif more is not None:
        assert more <= here + 1e-9
    for p in points:
        reached = speed_at(points, p.throughput)
        assert reached is not None
        assert reached >= p.speed_p50 - 1e-9


def test_matched_throughput_against_the_closed_form() -> None:
    # ours is 1.5 times as fast at equal load: at equal throughput T it needs fewer users,
    # u = 10 T / (1500 - T), and its users see 1500 / (10 + u) = 150 - T / 10 tokens/s
    result = compare_matched([arm(1.5)] * 3, [arm()] * 3)
    assert [level.load for level in result.levels] == list(LOADS)
    for level in result.levels:
        exact = (150 - level.throughput / 10) / (1000 / (10 + level.load))
        if level.throughput < 1.5 * point(1).throughput:
            exact = 1.5 * point(1).speed_p50 / (1000 / (10 + level.load))  # one user is the least
        assert level.ratio.mid == pytest.approx(exact, rel=1e-9)
    assert result.overall is not None
    assert result.overall.mid > 1.5  # more than at equal load
    assert result.left_out == ()


def test_what_ours_never_delivered_is_skipped() -> None:
    slower = compare_matched([arm(0.5)] * 3, [arm()] * 3)
    assert [level.load for level in slower.levels] == [1, 2, 4]
    assert len(slower.left_out) == 2
    assert "more than was measured" in slower.left_out[0]
    assert slower.overall is not None
    assert slower.overall.winner == "under"
    nothing = compare_matched([arm(0.01)] * 3, [arm()] * 3)
    assert (nothing.levels, nothing.overall) == ((), None)


def test_an_overloaded_baseline_does_not_count() -> None:
    sick = [*arm(), Point(32, 400, 12.5, 10, 9)]
    result = compare_matched([arm(1.5)] * 3, [sick] * 3)
    assert 32 not in [level.load for level in result.levels]
    assert "overloaded" in result.left_out[0]


def test_noise_widens_the_interval_about_the_truth() -> None:
    exact = compare_matched([arm(1.5)] * 3, [arm()] * 3).overall
    noisy = compare_matched(
        [arm(1.5, 0.02, seed) for seed in range(6)], [arm(1, 0.02, 9 + seed) for seed in range(6)]
    ).overall
    assert exact is not None
    assert noisy is not None
    assert noisy.low < exact.mid < noisy.high
    assert noisy.winner == "over"


def test_trials_must_match() -> None:
    with pytest.raises(DSparkError, match="same trials"):
        compare_matched([arm()], [arm()] * 2)
    with pytest.raises(DSparkError, match="different loads"):
        compare_matched([arm()] * 2, [arm(), arm()[:-1]])


HEADER = Header(0, 1, 0.0, "f", {"p50": 0, "p99": 0, "max": 0})


def test_a_void_cell_is_no_point() -> None:
    with pytest.raises(DSparkError, match="does not count: no request"):
        Point.of(4, measure_cell(HEADER, [], 4))


def test_a_point_has_the_slow_end_of_speed_and_of_waiting() -> None:
    """Eleven requests at 10, 11, ..., 20 tokens/s that wait 1, 2, ..., 11 s for the first."""
    records = [
        Record(
            index=i, prompt=f"p{i}", domain="math", outcome="ok", scheduled=None, sent=0.0,
            ended=2.0 + i, at=(1.0 + i, 2.0 + i), tokens=(1, 10 + i),
        )
        for i in range(11)
    ]  # fmt: skip
    found = Point.of(4, measure_cell(HEADER, records, 11))
    assert (found.load, found.speed_p50, found.speed_p10) == (4, 15.0, 11.0)
    assert found.ttft_p95 == pytest.approx(10.5)


def test_the_slowest_tenth_alone_can_miss_the_level() -> None:
    """The median and the fastest tenth hold at every load, the slowest tenth at load 1 alone."""
    points = [Point(1, 90, 90, 31, 0.1), Point(2, 170, 85, 29, 0.1)]
    found = capacity(points, Sla(speed_p50=80, speed_p10=30, ttft_p95=1))
    assert found.bracket == (1, 2)
    assert "speed at p10" in found.why


def test_equal_speeds_leave_the_point_that_delivers_more() -> None:
    slow, fast = Point(1, 50, 40, 30, 1), Point(2, 80, 40, 30, 1)
    assert frontier([slow, fast]) == frontier([fast, slow]) == [fast]
    assert speed_at([slow, fast], 80) == 40
    assert speed_at([slow, fast], 80.5) is None


def test_a_load_beyond_the_fastest_one_delivers_no_less() -> None:
    """Load 4 delivers less than load 2 and still holds the level: load 2 is what the arm can do."""
    points = [Point(1, 50, 50, 50, 1), Point(2, 90, 45, 45, 1), Point(4, 80, 41, 41, 1)]
    found = capacity(points, Sla(speed_p50=40))
    assert (found.kind, found.throughput, found.load) == ("at least", 90, 4)


def test_matched_intervals_by_the_t_table() -> None:
    """Two loads, four trials. Log ratios at load 1: e, 0, 0, 0; at load 2 minus as much, in the
    last trial; so overall their mean, e / 2, 0, 0, -e / 2. t(97.5%, 3) = 3.182446."""
    other = [Point(1, 100, 100, 90, 0.1), Point(2, 180, 90, 80, 0.1)]
    e = 0.01
    factors = [(e, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, -e)]
    ours = [
        [
            dataclasses.replace(p, speed_p50=p.speed_p50 * math.exp(step))
            for p, step in zip(other, steps, strict=True)
        ]
        for steps in factors
    ]
    found = compare_matched(ours, [other] * 4)
    for level, sign in zip(found.levels, (1, -1), strict=True):
        middle, half = sign * e / 4, 3.182446 * e / 4
        bounds = [math.log(level.ratio.low), math.log(level.ratio.high)]
        assert bounds == pytest.approx([middle - half, middle + half], rel=1e-6)
    assert found.overall is not None
    # standard error: sqrt(2 (e / 2)^2 / 3) / sqrt(4)
    half = 3.182446 * e * math.sqrt(1 / 24)
    bounds = [math.log(found.overall.low), math.log(found.overall.high)]
    assert bounds == pytest.approx([-half, half], rel=1e-6)


def test_the_baseline_of_a_level_is_the_mean_of_all_its_trials() -> None:
    trials = [[Point(1, throughput, 100, 90, 0.1)] for throughput in (90.0, 100.0, 116.0)]
    fast = [[Point(1, 200, 120, 90, 0.1)]] * 3
    (level,) = compare_matched(fast, trials).levels
    assert level.throughput == pytest.approx(102)


@pytest.mark.parametrize(
    ("sla", "load"),
    [
        (Sla(speed_p50=1000 / 16), 6),  # 1000 / (10 + users)
        (Sla(speed_p10=800 / 13), 3),
        (Sla(ttft_p95=1.2), 12),  # 0.1 s a user
        (Sla(speed_p50=1000 / 22, ttft_p95=0.5), 5),
        (Sla(speed_p50=1000 / 14), 4),  # a measured load
    ],
)
def test_capacity_lies_where_the_curve_crosses(sla: Sla, load: float) -> None:
    found = capacity(arm(), sla)
    assert found.kind == "bracketed"
    assert found.load == pytest.approx(load)
    assert found.throughput == pytest.approx(point(load).throughput, rel=0.05)
    low, high = found.bracket
    assert low is not None
    assert high is not None
    assert low <= load < high  # a load that just holds the level is the one that held


def test_what_lies_outside_is_said() -> None:
    never = capacity(arm(), Sla(speed_p50=200))
    assert (never.kind, never.throughput) == ("infeasible", 0)
    assert "speed at p50 is missed by a factor of 2.20 at the lowest load 1" in never.why
    always = capacity(arm(), Sla(speed_p50=1))
    assert (always.kind, always.load) == ("at least", 16)
    assert always.throughput == pytest.approx(arm()[-1].throughput)


def test_a_cliff_is_not_interpolated() -> None:
    broken = [*arm()[:4], dataclasses.replace(point(16), ttft_p95=60.0)]
    found = capacity(broken, Sla(ttft_p95=2))
    assert (found.kind, found.load) == ("cliff", 8)
    assert found.throughput == pytest.approx(point(8).throughput)
    assert "TTFT at p95 breaks down" in found.why


def test_one_lucky_point_does_not_count() -> None:
    speeds = (80, 70, 40, 61, 30)  # the fourth is noise: 40 and 61 are pooled to 50.5
    points = [Point(n, n * s, s, s, 1) for n, s in zip(LOADS, speeds, strict=True)]
    found = capacity(points, Sla(speed_p50=60))
    assert found.bracket == (2, 4)


@given(limit=st.floats(12, 89))
@settings(max_examples=60, deadline=None)
def test_the_search_finds_the_last_load_that_holds(limit: float) -> None:
    sla, points = Sla(speed_p50=limit), [point(4)]
    for _ in range(20):
        load = next_load(points, sla)
        if load is None:
            break
        points.append(point(load))
    exact = int(1000 / limit - 10 + 1e-9)
    assert exact >= 1
    held, missed = capacity(points, sla).bracket
    assert held == pytest.approx(exact, abs=max(1, 0.05 * exact))
    assert missed is not None
    assert held is not None
    assert held < missed <= max(held + 1, 1.05 * held)
    assert len(points) < 20


def test_the_search_ends_where_nothing_holds() -> None:
    assert next_load([point(1)], Sla(speed_p50=500)) is None
    assert next_load([point(1)], Sla(speed_p50=500), whole=False) == 0.5


def test_the_search_halves_the_load_until_it_holds() -> None:
    never = Sla(speed_p50=500)
    loads = [next_load([point(users)], never) for users in (16, 7, 3, 2, 1)]
    assert loads == [8.0, 3.0, 1.0, 1.0, None]
    assert next_load([point(16)], Sla(speed_p50=1)) == 32.0


def test_the_search_ends_where_loads_differ_by_a_twentieth() -> None:
    sla = Sla(speed_p50=1000 / 11.02)  # at 1.02 users
    assert next_load([point(1.0), point(1.04)], sla, whole=False) is None
    assert next_load([point(1.0), point(1.2)], sla, whole=False) == pytest.approx(math.sqrt(1.2))


def test_bad_levels_are_refused() -> None:
    for arguments in ({}, {"speed_p50": 0}, {"ttft_p95": float("nan")}):
        with pytest.raises(DSparkError):
            Sla(**arguments)
    with pytest.raises(DSparkError, match="p10 floor"):
        Sla(speed_p50=10, speed_p10=20)
    assert Sla(speed_p50=10, speed_p10=10)
    assert Sla(speed_p50=0.5), "less than a token a second is a level"
    with pytest.raises(DSparkError, match="no cell"):
        capacity([], Sla(speed_p50=1))
    with pytest.raises(DSparkError, match="one point per load"):
        capacity([point(1), point(1)], Sla(speed_p50=1))
    with pytest.raises(DSparkError, match="unknown"):
        capacity([dataclasses.replace(point(1), speed_p50=float("nan"))], Sla(speed_p50=1))
