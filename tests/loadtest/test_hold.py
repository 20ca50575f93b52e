"""The highest arrival rate within limits: the search finds it, noise errs low, a sweep keeps it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.measure import measure_cell
from sglang_dspark.loadtest.client.records import Header, Record
from sglang_dspark.loadtest.client.runner import CellResult
from sglang_dspark.loadtest.client.schedule import ClosedLoop, Poisson, Surge
from sglang_dspark.loadtest.report.page import make_report
from sglang_dspark.loadtest.sweep import run_dir
from sglang_dspark.loadtest.sweep.config import Hold, SweepConfig, load_sweep
from sglang_dspark.loadtest.sweep.hold import Bracket, Probe, bracket, next_rate
from sglang_dspark.loadtest.sweep.holding import held, next_probes, parse_hold
from sglang_dspark.loadtest.sweep.kept import within
from sglang_dspark.loadtest.sweep.parts import Within
from sglang_dspark.loadtest.sweep.run_dir import SUMMARY_FILE, Cell, Pilot
from sglang_dspark.loadtest.sweep.summary import summarise
from tests.loadtest.made_run import make_run
from tests.loadtest.test_summary import cell
from tests.loadtest.test_sweep import ended, folder, start, write_sweep  # noqa: F401 - a fixture

PILOT = Pilot(
    arm="plain", tokens_per_s={1: 40.0, 16: 240.0}, answer_tokens={1: 60.0, 16: 60.0}
)  # 4 requests/s
rates = st.floats(0.01, 1000.0)


def search(limit: float, start: float, most: int, narrow: float) -> list[Probe]:
    """All probes of a server that holds every rate up to `limit`."""
    probes: list[Probe] = []
    while (rate := next_rate(probes, start, most, narrow)) is not None:
        probes.append(Probe(rate, rate <= limit))
    return probes


@given(rates, rates, st.floats(0.02, 0.5))
def test_a_monotone_server_is_bracketed_as_narrow_as_asked(
    limit: float, start: float, narrow: float
) -> None:
    probes = search(limit, start, 60, narrow)
    assert len(probes) < 60
    found = bracket(probes)
    assert found.kind == "bracketed"
    assert found.held is not None
    assert found.missed is not None
    assert found.held <= limit < found.missed
    # Rates have three digits, as the names of cells.
    assert found.missed / found.held <= (1 + narrow) * 1.011
    assert len({probe.rate for probe in probes}) == len(probes)


@given(rates, rates, st.integers(2, 12))
def test_the_number_of_probes_is_bounded_and_says_the_truth(
    limit: float, start: float, most: int
) -> None:
    probes = search(limit, start, most, 0.05)
    assert 1 <= len(probes) <= most
    found = bracket(probes)
    assert found.held is None or found.held <= limit
    assert found.missed is None or found.missed > limit
    if len(probes) == most:
        assert next_rate(probes, start, most, 0.05) is None


def test_eight_probes_find_a_rate_near_the_first_to_a_tenth() -> None:
    for limit in (0.3, 0.9, 1.0, 1.7, 3.9):
        found = bracket(search(limit, 1.0, 8, 0.1))
        assert found.held is not None
        assert found.held >= 0.9 * limit


@given(rates, st.integers(2, 9))
def test_where_all_hold_or_none_does_that_is_said(start: float, most: int) -> None:
    every = search(float("inf"), start, most, 0.1)
    assert len(every) == most
    assert bracket(every) == Bracket(max(probe.rate for probe in every), None)
    assert bracket(every).kind == "at least"
    none = search(0.0, start, most, 0.1)
    assert bracket(none) == Bracket(None, min(probe.rate for probe in none))
    assert bracket(none).kind == "none"
    assert bracket([]).kind == "unknown"


@given(st.lists(st.tuples(st.floats(0.1, 50), st.booleans()), min_size=1, max_size=12), rates)
def test_noise_never_puts_the_held_rate_above_one_that_missed(
    found: list[tuple[float, bool]], start: float
) -> None:
    probes = [Probe(rate, good) for rate, good in found]
    said = bracket(probes)
    for probe in probes:
        if not probe.held and said.held is not None:
            assert said.held < probe.rate
    shuffled = list(probes)
    random.Random(0).shuffle(shuffled)
    assert bracket(shuffled) == said
    rate = next_rate(probes, start, 99, 0.1)
    if rate is not None:
        assert rate > 0
        assert all(rate != probe.rate for probe in probes)
        if said.held is not None and said.missed is not None:
            assert said.held <= rate <= said.missed


@given(st.floats(1.0, 20.0), st.integers(0, 1000))
def test_a_noisy_server_is_found_within_its_noise(limit: float, seed: int) -> None:
    noise = random.Random(seed)
    probes: list[Probe] = []
    while (rate := next_rate(probes, 2.0, 30, 0.05)) is not None:
        probes.append(Probe(rate, rate <= limit * noise.uniform(0.9, 1.1)))
    found = bracket(probes)
    assert found.held is not None
    assert 0.9 * limit / 1.07 <= found.held <= 1.1 * limit


def record(index: int, wait_ms: float, token_ms: float, outcome: str = "ok") -> Record:
    first = index + wait_ms / 1e3
    ok = outcome == "ok"
    return Record(
        index=index,
        prompt="p",
        domain="d",
        outcome=outcome,  # type: ignore[arg-type]  # of the test
        scheduled=float(index),
        sent=float(index),
        ended=first + 1,
        at=(first, first + 10 * token_ms / 1e3) if ok else (),
        tokens=(1, 10) if ok else (),
    )


def within_of(records: list[Record], hold: Hold) -> Within:
    header = Header(0, 1, 0.0, "f", {"p50": 0.0, "p99": 0.0, "max": 0.0})
    result = CellResult(header, tuple(records), measure_cell(header, records, None))
    found = within(hold, Poisson(rate=1, requests=len(records)), result)
    assert found is not None
    for other in (ClosedLoop(users=1, requests=1), Surge(rate=1, before_s=1, burst_s=1, after_s=1)):
        assert within(hold, other, result) is None
    return found


def test_p95_is_nineteen_of_twenty_and_failures_are_late() -> None:
    hold = Hold(p95_ttft_ms=100, p95_tpot_ms=20)
    fine = [record(n, 100 if n else 99, 10) for n in range(19)]
    fine = [record(n, 90, 10) for n in range(19)]
    one = within_of([*fine, record(19, 200, 10)], hold)
    assert (one.ttft, one.tpot, one.requests, one.held) == (0.95, 1.0, 19, True)
    assert one.tokens_per_s == pytest.approx(19 * 11 / (19 + 0.2 + 0.1))
    other = within_of([*fine[:-1], record(18, 90, 30), record(19, 200, 10)], hold)
    assert (other.ttft, other.tpot, other.requests, other.held) == (0.95, 0.95, 18, True)
    two = within_of([*fine[:-1], record(18, 90, 30), record(19, 90, 30)], hold)
    assert (two.ttft, two.tpot, two.held) == (1.0, 0.9, False)
    failed = within_of([*fine[:-1], record(18, 0, 0, "http"), record(19, 0, 0, "cut")], hold)
    assert (failed.ttft, failed.tpot, failed.held) == (0.9, 0.9, False)
    alone = within_of([*fine[:-1], record(18, 900, 10), record(19, 900, 10)], Hold(p95_tpot_ms=20))
    assert (alone.ttft, alone.tpot, alone.held) == (1.0, 1.0, True)


def probed(arm: str, rate: float, *, held: bool, **other: Any) -> Cell:
    kept = Within(ttft=1.0, tpot=1.0, requests=9, tokens_per_s=10 * rate, held=held)
    return cell(arm, 1, 0, 30.0, loop="open", level=rate, within=kept, **other)


CONFIG = SweepConfig(arms=["plain", "dspark"], concurrency=[1], hold={"p95_ttft_ms": 500})


def test_each_arm_is_probed_where_it_is_most_informative() -> None:
    first = next_probes(CONFIG, PILOT, [], 7)
    assert [(p.arm, p.load.level, p.order) for p in first] == [
        ("plain", 2.0, 7),
        ("dspark", 2.0, 8),
    ]
    assert first[0].load.arrivals == Poisson(rate=2.0, requests=40)  # 20 seconds
    # A queue that grows by a tenth passes 5 s only after 50 s.
    slow = CONFIG.model_copy(update={"hold": Hold(p95_ttft_ms=5000)})
    assert next_probes(slow, PILOT, [], 0)[0].load.arrivals == Poisson(rate=2.0, requests=100)
    short = CONFIG.model_copy(update={"hold": Hold(p95_tpot_ms=50, seconds=2)})
    assert next_probes(short, PILOT, [], 0)[0].load.arrivals == Poisson(rate=2.0, requests=24)
    cells = [probed("plain", 2.0, held=False), probed("dspark", 2.0, held=True)]
    second = next_probes(CONFIG, PILOT, cells, 0)
    assert [(p.arm, p.load.level) for p in second] == [("plain", 1.0), ("dspark", 4.0)]
    # A void probe says nothing, and is not asked for again and again.
    void = [*cells[1:], probed("plain", 2.0, held=True, void="late")]
    assert [p.arm for p in next_probes(CONFIG, PILOT, void, 0)] == ["dspark"]
    assert next_probes(CONFIG.model_copy(update={"hold": None}), PILOT, cells, 0) == []


def test_the_summary_says_what_each_arm_holds() -> None:
    cells = [
        probed("plain", 2.0, held=True),
        probed("plain", 2.1, held=False),
        probed("dspark", 4.0, held=True),
        probed("dspark", 4.0, held=True).model_copy(update={"trial": 1}),
        probed("dspark", 8.0, held=True, void="late"),
    ]
    plain, dspark = held(CONFIG, cells).arms
    assert (plain.kind, plain.rate, plain.missed, plain.goodput) == ("bracketed", 2.0, 2.1, 20.0)
    what = "with TTFT up to 500 ms at p95: 20.0 tokens/s of goodput."
    assert plain.said == f"plain holds 2 requests/s (not 2.1) {what}"
    assert (dspark.kind, dspark.rate, dspark.probes) == ("at least", 4.0, 1)
    assert "missed at none that was tried" in dspark.said
    one_missed = [*cells[:3], probed("dspark", 4.0, held=False).model_copy(update={"trial": 1})]
    assert held(CONFIG, one_missed).arms[1].kind == "none"
    assert "not at 4 requests/s either" in held(CONFIG, one_missed).arms[1].said
    assert held(CONFIG, []).arms[0].said.endswith("counts.")
    assert summarise(CONFIG, cells, 5).hold == held(CONFIG, cells)
    assert (held(CONFIG, cells).p95_ttft_ms, held(CONFIG, cells).p95_tpot_ms) == (500, None)
    both = CONFIG.model_copy(update={"hold": Hold(p95_ttft_ms=100, p95_tpot_ms=20)})
    assert (held(both, cells).p95_ttft_ms, held(both, cells).p95_tpot_ms) == (100, 20)


def test_the_report_leads_with_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    summary = run_dir.read_summary(run)
    cells = [probed("plain", 2.0, held=True), probed("dspark", 4.0, held=True)]
    run_dir.write(run / SUMMARY_FILE, summary.model_copy(update={"hold": held(CONFIG, cells)}))
    html = make_report(run).html
    assert html.index("held by plain: TTFT up to 500 ms at p95") < html.index("held by dspark")
    assert "4 req/s" in html
    assert "Arrival rate held with TTFT up to 500 ms at p95" in html


def test_limits_are_read_or_refused(tmp_path: Path) -> None:
    assert parse_hold("p95_ttft_ms <= 500, p95_tpot_ms<=60.5") == Hold(
        p95_ttft_ms=500, p95_tpot_ms=60.5
    )
    assert parse_hold("p95_tpot_ms<=60") == Hold(p95_tpot_ms=60)
    known = Hold(p95_ttft_ms=5, probes=3, seconds=4)
    assert parse_hold("p95_tpot_ms<=6", known) == Hold(p95_tpot_ms=6, probes=3, seconds=4)
    for text in (
        "",
        "p95_ttft_ms<500",
        "p95_ttft_ms<=0",
        "p95_ttft_ms<=inf",
        "p95_ttft_ms<=nan",
        "p99_ttft_ms<=5",
        "p95_ttft_ms<=5,p95_ttft_ms<=6",
        "p95_ttft_ms<=5,",
    ):
        with pytest.raises(DSparkError, match="is no limit; write p95_ttft_ms<=500"):
            parse_hold(text)
    path = tmp_path / "mine.yaml"
    for fields, said in (
        ("{}", "give p95_ttft_ms"),
        ("{p95_ttft_ms: 1, probes: 1}", "hold.probes"),
    ):
        path.write_text(f"arms: [plain]\nconcurrency: [1]\nhold: {fields}\n")
        with pytest.raises(DSparkError, match=said):
            load_sweep(path)


def test_a_sweep_holds_and_goes_on(folder: Path) -> None:  # noqa: F811 - the fixture
    hold = {"p95_tpot_ms": 1, "probes": 3, "seconds": 1, "requests": 9}
    write_sweep(folder, arms=["slow"], compare=None, trials=1, hold=hold)
    status, out = ended(start(folder, "--hold", "p95_tpot_ms<=100000"))
    assert status == 0, out
    run = folder / "run"
    probes = [each for each in run_dir.read_cells(run) if each.loop == "open"]
    assert 1 <= len(probes) <= 3  # the machine may be busy, and a void one ends the search
    assert all(each.within is not None for each in probes)
    good = [each for each in probes if not each.void]
    if good:
        assert f"slow holds {max(each.level for each in good):g} requests/s" in out
    assert all(each.requests >= 9 for each in probes)
    before = {path: path.read_bytes() for path in (run / "cells").glob("*.json")}
    status, out = ended(start(folder, "--hold", "p95_tpot_ms<=100000"))
    assert status == 0, out
    assert {path: path.read_bytes() for path in (run / "cells").glob("*.json")} == before
