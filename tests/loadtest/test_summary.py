"""Test the summary of cells: which arm wins, which cells are skipped, and conditions for CI."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.sweep import run_dir
from sglang_dspark.loadtest.sweep.config import SweepConfig
from sglang_dspark.loadtest.sweep.gates import misses, parse_gate
from sglang_dspark.loadtest.sweep.result import as_metrics
from sglang_dspark.loadtest.sweep.run import searched
from sglang_dspark.loadtest.sweep.run_dir import Cell, Percentiles, cell_name
from sglang_dspark.loadtest.sweep.summary import Cells, _load, matched_summary, summarise

CONFIG = SweepConfig(
    arms=["plain", "mtp1", "dspark"],
    compare={"over": "dspark", "under": "mtp1"},
    concurrency=[1, 2, 4],
    slas=[{"speed_p50": 30}],
)
NOISE = (1.0, 1.01, 0.99, 1.02)
# Speed per user at 1, 2 and 4 users; throughput is users times as much.
SPEEDS = {"plain": (40, 30, 20), "mtp1": (44, 33, 22), "dspark": (66, 49.5, 33)}


def spread(value: float) -> Percentiles:
    return Percentiles(mean=value, p10=0.9 * value, p50=value, p90=value, p95=value, p99=value)


def cell(arm: str, users: int, trial: int, speed: float, **other: Any) -> Cell:
    values: dict[str, Any] = {
        "arm": arm,
        "loop": "closed",
        "level": users,
        "trial": trial,
        "order": 0,
        "attempt": 0,
        "mix": "math",
        "fingerprint": "f",
        "started": "2026-01-01T00:00:00+00:00",
        "seconds": 9.0,
        "requests": 9,
        "ok": 9,
        "tokens": 500,
        "tokens_per_s": users * speed,
        "speed": spread(speed),
        "speeds": [speed],
        "ttft": spread(0.1),
        "itl": spread(1 / speed),
        "tpot": spread(1 / speed),
        "e2e": spread(2.0),
        "tau": 2.0,
        "steps": 9,
        "accepted": 9,
        "histogram": [0, 9],
        "step_s": 0.03,
        "verify_length": 1.0,
        "domains": {},
        "failures": {},
        "errors": {},
        "lag_ms": 1.0,
        "void": "",
    }
    return Cell(**{**values, **other})


def cells(trials: int = 4, **factors: float) -> list[Cell]:
    """All cells of CONFIG. factors: by arm, on its speed."""
    return [
        cell(arm, users, trial, factors.get(arm, 1.0) * speed * NOISE[trial])
        for trial in range(trials)
        for arm, speeds in SPEEDS.items()
        for users, speed in zip(CONFIG.concurrency, speeds, strict=True)
    ]


def without(all_cells: list[Cell], name: str) -> list[Cell]:
    return [
        each.model_copy(update={"void": "late"}) if each.name == name else each
        for each in all_cells
    ]


def test_a_clear_winner_is_named_with_its_interval() -> None:
    found = summarise(CONFIG, cells(), 36)
    assert found.verdict.startswith("dspark beats mtp1 in speed per user at matched throughput: ")
    first = found.matched[0]
    assert (first.over, first.under, first.trials) == ("dspark", "mtp1", 4)
    # At mtp1's 44 tokens/s (1 user) dspark is level at 66; at 88 (4 users) still at 54.
    by_level = {row.level: row.mid for row in first.levels}
    assert by_level[1] == pytest.approx(1.5, rel=1e-3)
    assert by_level[4] > 2
    assert first.low is not None
    assert first.low > 1.4
    assert found.notes == []
    assert [row.winner for row in found.ratios if row.over == "dspark"] == ["dspark"] * 12
    capacity = {arm.arm: arm for arm in found.slas[0].arms}
    assert capacity["dspark"].kind == "at least"
    assert capacity["plain"].tokens_per_s == pytest.approx(60, rel=0.02)


def test_simulated_acceptance_labels_the_summary() -> None:
    golden = CONFIG.model_copy(update={"golden": "qwen3-8b"})
    found = summarise(golden, cells(), 36)
    assert golden.label
    assert found.label == golden.label
    assert found.verdict.startswith(golden.label)
    assert summarise(CONFIG, cells(), 36).label == ""


def test_an_arm_without_a_valid_cell_has_no_capacity() -> None:
    void = [
        each.model_copy(update={"void": "late"}) if each.arm == "mtp1" else each for each in cells()
    ]
    capacity = {arm.arm: arm for arm in summarise(CONFIG, void, 36).slas[0].arms}
    found = capacity["mtp1"]
    assert (found.kind, found.tokens_per_s, found.load) == ("unknown", 0.0, 0.0)
    assert (found.bracket, found.why) == ((None, None), "no valid cell")
    assert capacity["plain"].kind == "bracketed"


def test_no_winner_is_called_on_noise() -> None:
    noisy = [
        each.model_copy(
            update={
                "speed": spread(
                    (each.speed.p50 or 0)
                    * (0.5 if (each.arm == "dspark" and each.trial % 2) else 1.0)
                )
            }
        )
        for each in cells(dspark=0.95)
    ]
    found = summarise(CONFIG, noisy, 36)
    assert found.verdict.startswith("No winner between dspark and mtp1")
    assert "contains 1" in found.verdict
    assert "too few to tell" in summarise(CONFIG, cells(trials=2), 18).verdict


def test_void_cells_are_skipped_and_reported() -> None:
    four = without(cells(), "dspark-closed-4-1")
    found = summarise(CONFIG, four, 40)
    assert found.matched[0].trials == 3  # the whole trials are enough
    assert "trial 2: a cell is missing or void" in found.matched[0].left_out
    assert "dspark-closed-4-1 is void: late" in found.notes
    assert "4 of 40 cells were not measured" in found.notes
    row = next(r for r in found.levels if (r.arm, r.level) == ("dspark", 4))
    assert (row.trials, row.void) == (3, 1)

    three = without(cells(trials=3), "mtp1-closed-4-1")
    matched = matched_summary(Cells.of(three), "dspark", "mtp1")
    assert matched.trials == 3  # fewer trials would name no winner: the load goes instead
    assert [level.level for level in matched.levels] == [1, 2]
    assert "load 4 of mtp1: not valid in every trial" in matched.left_out
    assert "2 of 3 loads of mtp1 could be matched" in matched.said


def test_an_arm_waits_as_long_as_its_slowest_twentieth() -> None:
    late = spread(0.1).model_copy(update={"p95": 0.5, "p99": 0.9})
    waits = [each.model_copy(update={"ttft": late}) for each in cells()]
    limits = [{"ttft_p95": 0.3}, {"ttft_p95": 0.6}]
    config = SweepConfig(arms=["plain", "mtp1", "dspark"], concurrency=[1, 2, 4], slas=limits)
    missed, held = summarise(config, waits, 36).slas
    assert {arm.kind for arm in missed.arms} == {"infeasible"}
    assert {arm.kind for arm in held.arms} == {"at least"}


def test_an_arm_is_as_fast_as_its_slowest_tenth() -> None:
    """Hold 9 tokens/s and miss 11 with a slowest tenth of 10 and a fastest one of 90."""
    uneven = [
        each.model_copy(update={"speed": each.speed.model_copy(update={"p10": 10.0, "p90": 90.0})})
        for each in cells()
    ]
    limits = [{"speed_p10": 9}, {"speed_p10": 11}]
    config = SweepConfig(arms=["plain", "mtp1", "dspark"], concurrency=[1, 2, 4], slas=limits)
    found = summarise(config, uneven, 36)
    held, missed = found.slas
    assert {arm.kind for arm in held.arms} == {"at least"}
    assert {arm.kind for arm in missed.arms} == {"infeasible"}
    for row in found.levels:
        assert row.speed_p10 is not None
        assert row.speed_p10.mid == pytest.approx(10.0)


def test_the_interval_of_a_level_by_the_t_table() -> None:
    """Four trials, log speeds 0, 0, 0, 0.04 above 1: t(97.5%, 3) = 3.182446 standard errors."""
    speeds = (1.0, 1.0, 1.0, math.exp(0.04))
    made = [cell("plain", 1, trial, speed) for trial, speed in enumerate(speeds)]
    config = SweepConfig(arms=["plain"], concurrency=[1])
    (row,) = summarise(config, made, 4).levels
    for found in (row.tokens_per_s, row.speed_p50):
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        bounds = [math.log(found.low), math.log(found.mid), math.log(found.high)]
        half = 3.182446 * 0.01
        assert bounds == pytest.approx([0.01 - half, 0.01, 0.01 + half], abs=1e-7)


def test_throughput_never_reached_is_not_compared() -> None:
    slow = matched_summary(Cells.of(cells(dspark=0.5)), "dspark", "mtp1")
    assert any("more than was measured of ours" in line for line in slow.left_out)
    assert "loads of mtp1 could be matched" in slow.said
    nothing = matched_summary(Cells.of([]), "dspark", "mtp1")
    assert (nothing.mid, nothing.levels) == (None, [])
    assert "nothing could be compared" in nothing.said


def test_the_search_asks_for_the_most_informative_cells() -> None:
    pilot = run_dir.Pilot(arm="plain", tokens_per_s={1: 40, 4: 80}, answer_tokens={1: 60, 4: 60})
    # 30 tokens/s/user: plain holds it at 2 users and not at 4, dspark still holds it at 4.
    found = searched(CONFIG, pilot, cells(), 4, 36)
    assert {(each.arm, each.load.level) for each in found} == {
        ("plain", 3),
        ("mtp1", 3),
        ("dspark", 8),
    }
    assert [each.order for each in found] == list(range(36, 48))
    assert {each.trial for each in found} == {0, 1, 2, 3}
    done = [
        *cells(),
        *(
            cell(arm, users, trial, 25.0)
            for trial in range(4)
            for arm, users in (("plain", 3), ("mtp1", 3))
        ),
    ]
    assert {each.arm for each in searched(CONFIG, pilot, done, 4, 36)} == {"dspark"}
    assert searched(CONFIG, pilot, [], 4, 0) == []


def test_conditions() -> None:
    def missed(text: str, *given: Cell) -> list[str]:
        return misses([parse_gate(text, CONFIG.names)], given or cells())

    assert missed("dspark >= mtp1 @ matched : 1.3") == []
    assert missed("dspark>=plain@speed-4:1.6") == []
    assert missed("dspark>=mtp1@throughput-2:1.45") == []
    assert "is not shown: dspark beats mtp1" in missed("dspark>=mtp1@matched:9")[0]
    assert "is not shown" in missed("dspark>=mtp1@speed-1:1.4", *cells(trials=2))[0]
    assert "cannot be judged" in missed("dspark>=mtp1@speed-64:1")[0]
    assert "cannot be judged" in missed("dspark>=mtp1@matched:1", cell("plain", 1, 0, 40))[0]
    for text in ("dspark>mtp1@matched:1", "dspark>=mtp1@matched", "dspark>=mtp1@speed:1", ""):
        with pytest.raises(DSparkError, match="not of the form"):
            parse_gate(text, CONFIG.names)
    with pytest.raises(DSparkError, match="no arm mtp9"):
        parse_gate("dspark>=mtp9@matched:1", CONFIG.names)


def test_the_folder_gives_back_what_was_written(tmp_path: Path) -> None:
    all_cells = cells()
    for each in all_cells:
        run_dir.write(tmp_path / run_dir.CELLS / f"{each.name}.json", each)
    summary = summarise(CONFIG, all_cells, 36)
    run_dir.write(tmp_path / run_dir.SUMMARY_FILE, summary)
    assert run_dir.read_summary(tmp_path) == summary
    name = cell_name("mtp1", "closed", 2, 3)
    assert run_dir.read_cell(tmp_path, name) in all_cells
    assert run_dir.read_cell(tmp_path, "mtp1-closed-2-9") is None
    assert len(run_dir.read_cells(tmp_path)) == len(all_cells)
    with pytest.raises(DSparkError, match="name a sweep's folder"):
        run_dir.read_run(tmp_path)
    (tmp_path / run_dir.RUN_FILE).write_text('{"version": 99}')
    with pytest.raises(DSparkError, match="another version"):
        run_dir.read_run(tmp_path)
    (tmp_path / run_dir.RUN_FILE).write_text('{"name": 1')
    with pytest.raises(DSparkError, match="no file of a sweep"):
        run_dir.read_run(tmp_path)


def test_published_figures_have_their_names() -> None:
    info = run_dir.RunInfo(
        name="s",
        config={},
        argv=[],
        commit="c",
        versions={},
        device="d",
        hardware={},
        arms=[],
        cores=run_dir.Cores(server=[], client=[], nice=0, why=""),
        pilot=None,
        plan=[],
        started="2026-01-01T00:00:00+00:00",
    )
    metrics = as_metrics(CONFIG, info, summarise(CONFIG, cells(), 36))
    assert metrics["matched_speed_ratio_vs_mtp1"].keys() >= {"low", "mid", "high"}
    assert metrics["complete"] is False
    rows = metrics["by_concurrency"]
    assert [row["concurrency"] for row in rows] == [1, 2, 4]
    assert rows[0]["dspark"]["tau"] == 2.0


def test_cells_without_a_speed_per_user_keep_their_throughput() -> None:
    """A server that sends whole answers in one chunk has no speed; the other arms have."""
    none = Percentiles(mean=None, p10=None, p50=None, p90=None, p95=None, p99=None)
    mute = [
        each.model_copy(update={"speed": none} if each.arm == "mtp1" else {}) for each in cells()
    ]
    found = summarise(CONFIG, mute, 36)
    levels = {(row.arm, row.level): row for row in found.levels}
    assert levels["mtp1", 4].speed_p50 is None
    assert (levels["mtp1", 4].trials, levels["mtp1", 4].void) == (4, 0)
    assert levels["mtp1", 4].tokens_per_s is not None
    assert levels["dspark", 4].speed_p50 is not None
    ratios = {(row.over, row.under, row.what) for row in found.ratios}
    assert ("dspark", "mtp1", "tokens_per_s") in ratios
    assert ("dspark", "mtp1", "speed_p50") not in ratios
    assert found.matched[0].mid is None
    assert "nothing could be compared" in found.verdict
    gate = parse_gate("dspark>=mtp1@speed-4:1.0", CONFIG.names)
    assert "cannot be judged" in misses([gate], mute)[0]


def test_failures_come_with_their_reason_and_warnings_once() -> None:
    broken = {"failures": {"error": 2}, "errors": {"error": "boom"}}
    odd = {"warnings": {"short": "answers are short: 2 of 64"}}
    some = [
        each.model_copy(update=broken if each.name == "plain-closed-1-0" else {})
        for each in cells()
    ]
    some = [each.model_copy(update=odd if each.arm == "dspark" else {}) for each in some]
    assert summarise(CONFIG, some, 36).notes == [
        "plain-closed-1-0: of 9 requests 2 error (boom)",
        "dspark-closed-1-0: answers are short: 2 of 64 (so in 12 of 12 cells of dspark)",
    ]


def test_a_load_is_said_in_words() -> None:
    assert _load("closed", 1) == "1 user"
    assert [_load("closed", level) for level in (0, 2)] == ["0 users", "2 users"]
    assert _load("open", 1) == "1 requests/s"
