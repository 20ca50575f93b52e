"""A burst: arrivals as asked; latencies before, in and after it told apart, up to the report."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sglang_dspark.cli._sweep_view import burst_tables
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.records import Record
from sglang_dspark.loadtest.client.records_file import read_records
from sglang_dspark.loadtest.client.schedule import PHASES, Poisson, Surge
from sglang_dspark.loadtest.report.data import Run
from sglang_dspark.loadtest.report.figures import draw_all
from sglang_dspark.loadtest.report.page import make_report
from sglang_dspark.loadtest.sweep import run_dir
from sglang_dspark.loadtest.sweep.bursts import bursts
from sglang_dspark.loadtest.sweep.config import SweepConfig, load_sweep
from sglang_dspark.loadtest.sweep.kept import phases_of
from sglang_dspark.loadtest.sweep.parts import Phase
from sglang_dspark.loadtest.sweep.plan import all_loads, rough_seconds
from sglang_dspark.loadtest.sweep.run_dir import CELLS, SUMMARY_FILE, Pilot
from sglang_dspark.loadtest.sweep.summary import summarise
from tests.loadtest.made_run import make_run
from tests.loadtest.test_summary import cell
from tests.loadtest.test_sweep import ended, folder, start, write_sweep  # noqa: F401 - a fixture

SURGE = Surge(rate=2.0, factor=10.0, before_s=5.0, burst_s=2.0, after_s=5.0)
PILOT = Pilot(
    arm="plain", tokens_per_s={1: 40.0, 16: 240.0}, answer_tokens={1: 60.0, 16: 60.0}
)  # 4 requests/s


@given(
    st.floats(0.1, 20.0),
    st.floats(1.5, 20.0),
    st.floats(0.5, 20.0),
    st.floats(0.5, 20.0),
    st.floats(0.5, 20.0),
    st.integers(0, 100),
)
def test_arrivals_ascend_and_fill_every_phase(
    rate: float, factor: float, before: float, burst: float, after: float, seed: int
) -> None:
    surge = Surge(rate=rate, factor=factor, before_s=before, burst_s=burst, after_s=after)
    at = surge.times(np.random.default_rng(seed)).tolist()
    assert all(a <= b for a, b in pairwise(at))
    assert at[0] >= 0
    assert at[-1] <= surge.seconds
    assert {surge.phase(each) for each in at} == set(PHASES)
    assert at == surge.times(np.random.default_rng(seed)).tolist()


def test_the_burst_has_as_many_more_as_asked() -> None:
    counts = dict.fromkeys(PHASES, 0)
    for seed in range(400):
        for at in SURGE.times(np.random.default_rng(seed)).tolist():
            counts[SURGE.phase(at)] += 1
    assert counts["before"] / 400 == pytest.approx(10, rel=0.05)
    assert counts["burst"] / 400 == pytest.approx(40, rel=0.03)
    assert counts["after"] / 400 == pytest.approx(10, rel=0.05)
    assert SURGE.expected == 60
    assert [SURGE.phase(at) for at in (0.0, 4.9, 5.0, 6.9, 7.0, 99.0)] == [
        "before",
        "before",
        "burst",
        "burst",
        "after",
        "after",
    ]


def record(index: int, scheduled: float | None, wait: float, ok: bool = True) -> Record:
    sent = scheduled or 0.0
    first = sent + wait
    return Record(
        index=index,
        prompt="p",
        domain="d",
        outcome="ok" if ok else "http",
        scheduled=scheduled,
        sent=sent,
        ended=first + 1.0,
        at=(first, first + 1.0) if ok else (),
        tokens=(1, 10) if ok else (),
    )


def test_requests_belong_to_the_phase_in_which_they_were_due() -> None:
    records = [
        record(0, 1.0, 0.1),
        record(1, 4.99, 8.0),  # answered in the burst, due before it
        record(2, 5.0, 2.0),
        record(3, 6.0, 4.0, ok=False),
        record(4, 7.0, 0.5),
    ]
    before, burst, after = phases_of(SURGE, records)
    assert [(p.name, p.requests, p.ok) for p in (before, burst, after)] == [
        ("before", 2, 2),
        ("burst", 2, 1),
        ("after", 1, 1),
    ]
    assert before.ttft_p50 == pytest.approx(4.05)
    assert before.ttft_p99 == pytest.approx(8.0 - 0.01 * 7.9)
    assert burst.ttft_p99 == pytest.approx(2.0)
    assert burst.e2e_p99 == pytest.approx(3.0)
    assert after.tpot_p99 == pytest.approx(0.1)
    assert phases_of(Poisson(rate=1, requests=5), records) == []


def phases(scale: float) -> list[Phase]:
    return [
        Phase(
            name=name,
            requests=10,
            ok=9,
            ttft_p50=scale * n,
            ttft_p99=2 * scale * n,
            tpot_p99=None,
            e2e_p99=3 * scale * n,
        )
        for n, name in enumerate(PHASES, 1)
    ]


def test_trials_are_put_together_arm_by_arm() -> None:
    cells = [
        cell(arm, 1, trial, 30.0, loop="open", level=3.0, phases=phases(scale))
        for arm, scales in (("plain", (1.0, 5.0, 2.0)), ("dspark", (0.1, 0.2, 0.3)))
        for trial, scale in enumerate(scales)
    ]
    cells.append(cell("plain", 4, 0, 30.0))
    (found,) = bursts(["dspark", "plain", "absent"], cells)
    assert (found.level, [arm.arm for arm in found.arms]) == (3.0, ["dspark", "plain"])
    assert [arm.trials for arm in found.arms] == [3, 3]
    burst = found.arms[1].phases[1]
    assert (burst.name, burst.requests, burst.ok) == ("burst", 30, 27)
    assert (burst.ttft_p50, burst.ttft_p99, burst.tpot_p99, burst.e2e_p99) == (4, 8, None, 12)
    assert bursts(["plain"], cells[-1:]) == []


def test_a_burst_is_planned_by_the_pilot(tmp_path: Path) -> None:
    config = SweepConfig(arms=["plain"], concurrency=[1], open={"burst": {"load": 0.25}})
    load = all_loads(config, PILOT)[-1]
    assert load.arrivals == Surge(rate=1.0, factor=10, before_s=10, burst_s=2, after_s=10)
    assert load.level == pytest.approx(40 / 22, rel=0.01)
    assert load.expected_s == pytest.approx(22 + 4)  # and the last answers
    heavy = SweepConfig(arms=["plain"], concurrency=[1], open={"burst": {"load": 1.0}})
    # 160 requests at 4 a second take longer than they come.
    assert all_loads(heavy, PILOT)[-1].expected_s == pytest.approx(40 + 4)
    cells, seconds = rough_seconds(config, 0)
    assert cells == 3 * 2
    assert seconds > 3 * (10 + 22 + 10)
    path = tmp_path / "mine.yaml"
    for burst, said in (
        ({"factor": 1}, "open.burst.factor"),
        ({"load": 0}, "open.burst.load"),
        ({"burst_s": -1}, "open.burst.burst_s"),
        ({"size": 3}, "open.burst.size: no such field"),
    ):
        fields = {"arms": ["plain"], "concurrency": [1], "open": {"burst": burst}}
        path.write_text(yaml.safe_dump(fields))
        with pytest.raises(DSparkError, match=said):
            load_sweep(path)


def test_the_report_shows_the_phases(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = Run.read(run)
    made = [
        each.model_copy(update={"level": 2.25, "phases": phases(scale), "order": 100 + n})
        for n, (arm, scale) in enumerate((("plain", 0.5), ("dspark", 0.25)))
        for each in before.good(arm, "open")[:1]
    ]
    for each in made:
        run_dir.write(run / CELLS / f"{each.name}.json", each)
    cells = run_dir.read_cells(run)
    config = SweepConfig.model_validate(before.info.config)
    run_dir.write(run / SUMMARY_FILE, summarise(config, cells, len(cells)))
    html = make_report(run).html
    assert "A burst at 2.25 requests/s on average: latency, ms" in html
    words = re.sub("<[^>]+>", " ", html[html.index("A burst at 2.25") :]).split()
    plain = words.index("burst", words.index("plain"))
    assert words[plain : plain + 8] == ["burst", "9", "of", "10", "1000.0", "2000.0", "-", "3000.0"]
    after = Run.read(run)
    (steady,) = [drawn.figure for drawn in draw_all(after) if drawn.stem == "open-loop"]
    offered = {x for line in steady.axes[0].get_lines() for x in np.atleast_1d(line.get_xdata())}
    assert 2.25 not in offered  # a burst is no point of a steady load's curve
    assert {0.5, 1.5} <= offered

    console = Console(width=100, record=True, file=io.StringIO())
    for table in burst_tables(after.summary):
        console.print(table)
    shown = console.export_text()
    assert "mean rate 2.25 req/s" in shown
    assert "2000" in shown


def test_a_burst_is_swept(folder: Path) -> None:  # noqa: F811 - the fixture
    burst: dict[str, Any] = {"load": 0.5, "factor": 5, "before_s": 1, "burst_s": 0.5, "after_s": 1}
    write_sweep(folder, open={"burst": burst}, trials=1)
    status, out = ended(start(folder, "--json", "sweep.json"))
    assert status == 0, out
    cells = {c.arm: c for c in run_dir.read_cells(folder / "run") if c.loop == "open"}
    valid = any(not kept.void for kept in cells.values())  # the machine may be busy
    assert valid == ("A burst, p99" in out)
    assert set(cells) == {"slow", "fast"}
    assert len({c.fingerprint for c in cells.values()}) == 1
    for arm, kept in cells.items():
        assert [phase.name for phase in kept.phases] == list(PHASES)
        assert sum(phase.requests for phase in kept.phases) == kept.requests
        _, records = read_records(folder / "run" / "cells" / f"{kept.name}.parquet")
        early = [r for r in records if r.scheduled is not None and r.scheduled < 1]
        assert kept.phases[0].requests == len(early), arm
        assert kept.phases[0].ttft_p99 == pytest.approx(
            float(np.percentile([r.ttft for r in early], 99))
        )
    if all(not kept.void for kept in cells.values()):
        (found,) = json.loads((folder / "sweep.json").read_text())["metrics"]["bursts"]
        assert [arm["arm"] for arm in found["arms"]] == ["slow", "fast"]
