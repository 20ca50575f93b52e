"""The kit's stage `first`: servers that fail at any rung, rounds in turn, and the whole stage."""

from __future__ import annotations

import json
import tarfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.bench.paired import Plan
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec
from sglang_dspark.ports import free_port
from tests.tools.kit_runs import ROOT, dry_run, kit
from tools.gpu.kit import rounds
from tools.gpu.kit.first import ATTENDED, add, measured, start_two
from tools.gpu.kit.ladder import RUNGS, Ladder
from tools.gpu.kit.models import TINY, ready
from tools.gpu.kit.preflight import checked
from tools.gpu.kit.rounds import Cell, Comparison
from tools.gpu.kit.sampled import KINDS, MIXED

pytestmark = pytest.mark.xdist_group("gpu-kit")

# A server that is ready at once, unless the start it was given is among those that fail.
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

named = os.environ.get("SGLANG_DSPARK_CONFIG")
config = json.load(open(named)) if named else {}
way = "as it comes"
for flag in ("--disable-overlap-schedule", "--disable-cuda-graph"):
    way = flag if flag in sys.argv else way
if config.get("verify", {}).get("window_kernel") is False:
    assert "--disable-prefill-cuda-graph" in sys.argv
    way = "no prefill graphs, verify: {window_kernel: false}"
if config.get("schedule", {}).get("mode") == "static":
    way = "schedule: {mode: static}"
if os.environ.get("DSPARK_DISABLE") == "1":
    way = "DSPARK_DISABLE=1"
if way in os.environ["FAILING"].split("|"):
    sys.exit(f"RuntimeError: injected into {way}")

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""
NAMES = [rung.name for rung in RUNGS]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerSpec:
    (tmp_path / "stub_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.delenv("SGLANG_DSPARK_CONFIG", raising=False)
    return ServerSpec("dspark", tmp_path, free_port("127.0.0.1"), module="stub_server")


def rows(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    return [each["row"] for each in found if "row" in each]


@pytest.mark.parametrize("failing", range(len(NAMES) + 1))
def test_the_first_start_that_works_serves_and_each_failure_has_its_log(
    stub: ServerSpec,
    failing: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILING", "|".join(NAMES[:failing]))
    ladder = Ladder(stub, tmp_path / "logs", lambda: 60.0)
    server = ladder.ready()
    try:
        found = rows(capsys.readouterr().out)
        assert [row["ladder"] for row in found] == NAMES[: failing + 1]
        for row in found[:failing]:
            assert f"RuntimeError: injected into {row['ladder']}" in row["failed"]
            assert row["log"] == f"RuntimeError: injected into {row['ladder']}"
        if failing == len(NAMES):
            assert (server, ladder.rung) == (None, "")
        else:
            assert server is not None
            assert server.alive()
            assert (ladder.rung, "failed" in found[-1]) == (NAMES[failing], False)
    finally:
        ladder.stop()
    assert server is None or not server.alive()


def test_no_start_is_begun_in_time_kept_back(
    stub: ServerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("FAILING", "")
    ladder = Ladder(stub, tmp_path, lambda: 89.0, reserve_s=90.0)
    assert ladder.ready() is None
    assert rows(capsys.readouterr().out) == [
        {"ladder": NAMES[0], "failed": "no time is left for this start"}
    ]


def test_a_configuration_in_force_is_kept_beside_the_step_log(
    stub: ServerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.yaml").write_text("schedule: {lag: 1}\ncpu: {overlap: true}\n")
    monkeypatch.setenv("SGLANG_DSPARK_CONFIG", str(tmp_path / "own.yaml"))
    static = NAMES.index("schedule: {mode: static}")
    monkeypatch.setenv("FAILING", "|".join(NAMES[:static]))
    ladder = Ladder(stub, tmp_path / "logs", lambda: 60.0)
    try:
        assert ladder.ready() is not None
        written = json.loads((tmp_path / "logs" / f"rung-{static}" / "dspark.json").read_text())
    finally:
        ladder.stop()
    step_log = str(tmp_path / "logs" / "steps.jsonl")
    assert written == {
        "schedule": {"lag": 1, "mode": "static", "step_log": step_log}, "cpu": {"overlap": True}
    }  # fmt: skip


class Given(Comparison):
    """Rounds whose rows are given; a server answers until its rows are used up."""

    def __init__(self, up: dict[str, Any], given: dict[str, list[dict[str, Any]]]) -> None:
        super().__init__(up, Plan(((1,),), (1,), 1, 8), np.arange(9), "cpu")
        self.given, self.asked = given, []  # type: ignore[var-annotated]

    def _one(self, name: str, cell: Cell) -> dict[str, Any]:
        self.asked.append(name)
        if not self.given[name]:
            raise DSparkError(f"{name} died")
        return self.given[name].pop(0)


def row(speed: float, right: int = 96) -> dict[str, Any]:
    return {"users": 1, "whole_tokens_per_s": speed, "right": [right, 96]}


CELL = Cell(1, "greedy")


def test_ratios_are_of_the_scheduled_server_over_each_other_in_pairs() -> None:
    up: dict[str, Any] = {"dspark": None, "plain": None, "mtp1": None}
    given = {"dspark": [row(30.0)] * 3, "plain": [row(10.0), row(12.0), row(15.0)],
             "mtp1": [row(20.0)] * 3}  # fmt: skip
    comparison = Given(up, given)
    for repeat in range(3):
        assert list(comparison.measure([CELL], repeat)) == []
    assert comparison.asked[:6] == ["dspark", "plain", "mtp1", "plain", "mtp1", "dspark"]
    assert comparison.passed
    plain, mtp1 = comparison.ratios()
    assert (plain["over"], plain["trials"]) == ("plain", 3)
    assert plain["ratio"] == pytest.approx((3 * 2.5 * 2) ** (1 / 3))
    assert plain["interval"][0] < plain["ratio"] < plain["interval"][1]
    assert (mtp1["over"], mtp1["ratio"]) == ("mtp1", pytest.approx(1.5))


def test_a_server_that_started_later_is_paired_with_the_rounds_it_was_in() -> None:
    up: dict[str, Any] = {"dspark": None}
    comparison = Given(up, {"dspark": [row(10.0), row(30.0)], "mtp1": [row(20.0)]})
    list(comparison.measure([CELL], 0))
    comparison.up["mtp1"] = None  # type: ignore[assignment]
    list(comparison.measure([CELL], 1))
    [mtp1] = comparison.ratios()
    assert (mtp1["ratio"], mtp1["trials"]) == (1.5, 1)


@pytest.mark.parametrize(
    ("sampling", "right", "passes"),
    [("greedy", 96, True), ("greedy", 95, False), ("T=1", 60, True), ("T=1", 47, False)],
)
def test_wrong_tokens_fail_the_stage(
    sampling: str, right: int, passes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Given({"plain": None}, {"plain": [row(1.0, right)]})
    list(comparison.measure([Cell(1, sampling)], 0))
    assert comparison.passed == passes
    said = capsys.readouterr().err
    wrong = f"rounds: plain, 1 users, {sampling}: {96 - right} of 96 tokens are not the table's\n"
    assert said == ("" if passes else wrong)


def test_no_server_gets_requests_that_would_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MTP-1 and SGLang's own DSPARK accept some sampled drafts by FlashInfer alone."""
    monkeypatch.setattr(rounds, "find_spec", lambda name: None)
    names = ("dspark", "mtp1", "upstream-dspark-static")
    plan = Plan(((1,),), (1,), 1, 8)
    asked = []
    for device in ("cuda", "cpu"):
        comparison = Comparison(dict.fromkeys(names), plan, np.arange(9), device)  # type: ignore[arg-type]
        monkeypatch.setattr(comparison, "_one", lambda name, cell: asked.append(name) or row(1.0))
        for repeat in range(2):
            list(comparison.measure([Cell(1, each) for each in rounds.SETTINGS], repeat))
    for name, count in (("dspark", 12), ("mtp1", 8), ("upstream-dspark-static", 10)):
        assert asked.count(name) == count
    refused = [each for each in rows(capsys.readouterr().out) if "failed" in each]
    assert [(each["server"], each["sampling"]) for each in refused] == [
        ("mtp1", "T=1"), ("upstream-dspark-static", "Qwen3 defaults"), ("mtp1", "Qwen3 defaults")
    ]  # fmt: skip


def test_a_scheduled_server_that_dies_in_a_round_is_started_one_rung_down(
    stub: ServerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("FAILING", "")
    ladder = Ladder(stub, tmp_path / "logs", lambda: 60.0)
    plain = ServerProcess(
        ServerSpec("plain", tmp_path, free_port("127.0.0.1"), module="stub_server"), tmp_path
    )
    try:
        up = start_two(ladder, plain)
        assert list(up) == ["dspark", "plain"]
        first = up["dspark"]
        comparison = Given(up, {"dspark": [row(3.0)], "plain": [row(1.0)] * 3})
        assert measured(comparison, ladder, [CELL], 0)
        assert not measured(comparison, ladder, [CELL], 1)
        assert not first.alive()
        assert up["dspark"].alive()
        comparison.given["dspark"] = [row(2.0)]
        assert measured(comparison, ladder, [CELL], 2)
    finally:
        ladder.stop()
        plain.stop()
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ladder_rows = [each["row"] for each in said if "ladder" in each.get("row", {})]
    assert [(each["ladder"], each.get("failed")) for each in ladder_rows] == [
        (NAMES[0], None), (NAMES[0], "dspark died"), (NAMES[1], None)
    ]  # fmt: skip
    [ratio] = said[-1]["ratios"]
    assert (ratio["ratio"], ratio["trials"]) == (2.0, 1), "rounds of the dead server are gone"


def test_a_server_that_does_not_come_up_is_a_row_and_the_others_go_on(
    stub: ServerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("FAILING", "as it comes")
    server, up = ServerProcess(stub, tmp_path).start(), {}  # type: ignore[var-annotated]
    assert not add(up, "mtp1", server, 60.0)
    [found] = rows(capsys.readouterr().out)
    assert (found["server"], up) == ("mtp1", {})
    assert "injected into as it comes" in found["failed"]
    assert found["log"] == "RuntimeError: injected into as it comes"


def test_a_round_that_hangs_is_a_lost_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(*_: Any) -> None:
        await rounds.asyncio.sleep(60)

    monkeypatch.setattr(rounds, "ROUND_S", 0.05)
    monkeypatch.setattr(rounds, "fresh_round", endless)
    monkeypatch.setattr(
        rounds, "post", lambda url, body: sent.append((url, len(body["input_ids"])))
    )
    monkeypatch.setattr(rounds, "admitted", lambda server: 0.0)
    sent: list[tuple[str, int]] = []
    server = SimpleNamespace(spec=SimpleNamespace(name="mtp1", url="u"), resume=int, pause=int)
    comparison = Comparison({"mtp1": server}, Plan(((1,),), (1,), 1, 8), np.arange(9), "cpu")  # type: ignore[dict-item]
    [(name, error)] = comparison.measure([Cell(8, "greedy")], 0)
    assert name == "mtp1"
    assert str(error) == "mtp1: 8 users were not answered within 0 s"
    assert (comparison.up, comparison.passed) == ({}, False)
    assert sent == [("u/generate", 8)], "the cell's requests once before, unmeasured"


def test_a_failed_check_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert checked("fine", lambda: {"a": 1})
    assert not checked("bad", lambda: {"b": int("x")})
    fine, bad = rows(capsys.readouterr().out)
    assert (fine["preflight"], fine["a"]) == ("fine", 1)
    assert bad["failed"].startswith("ValueError: invalid literal")


def judge_rounds(found: dict[str, Any]) -> None:
    """Every round of every arm is there, and every greedy token is the table's."""
    each_round = [row for row in found["metrics"]["rows"] if "sampling" in row]
    greedy = [row for row in each_round if row["sampling"] == "greedy"]
    assert {(row["server"], row["users"], row["repeat"]) for row in greedy} == {
        *product(("dspark", "plain"), (1, 2), (0, 1)), ("mtp1", 1, 1), ("mtp1", 2, 1)
    }  # fmt: skip
    assert {tuple(row["right"]) for row in greedy} == {(282, 282)}  # 12 answers of 24 tokens +- 50%
    sampled = {(row["server"], row["sampling"]) for row in each_round} - {
        (row["server"], "greedy") for row in greedy
    }
    assert sampled == set(product(("dspark", "plain", "mtp1"), ("T=1", "Qwen3 defaults")))


def judge_steps(found: dict[str, Any]) -> None:
    tiers = [row for row in found["metrics"]["rows"] if "tier" in row]
    assert sum(row["steps"] for row in tiers) >= 20
    assert all(row["measured_ms"] > 0 and row["startup_ms"] > 0 for row in tiers)
    traced = found["metrics"]["traced_2"]
    assert traced["steps"] >= 4
    assert {"step", "plan", "learn"} <= set(traced["host_us"])
    assert traced["ours_us"] > 0


def judge_attending(found: dict[str, Any]) -> None:
    """By a drafter of blocks and by one that runs once a token."""
    rows = [row for row in found["metrics"]["rows"] if "attending" in row]
    assert [row["drafter"] for row in rows] == ["dspark"] * len(ATTENDED) + ["mtp"] * len(ATTENDED)
    for row in rows:
        assert row["equal"] + row["near_ties"] == row["requests"]


@pytest.mark.slow
@pytest.mark.server
def test_the_whole_stage_runs_here(tmp_path: Path) -> None:
    """Real servers of the tiny target: every part of the stage, and what it leaves."""
    found = dry_run(tmp_path / "out", "first")["first"]
    assert (found["incomplete"], found["metrics"]["measured"]) == (None, False)
    judge_rounds(found)
    judge_steps(found)
    drawn = {row["sampled"] for row in found["metrics"]["rows"] if "sampled" in row}
    assert drawn == {*KINDS, MIXED}
    judge_attending(found)
    assert unpack_names(tmp_path / "out" / "logs-1.tar.xz") >= {"plain.log", "rung-0/dspark.log"}


@pytest.mark.slow
@pytest.mark.server
def test_a_stage_whose_default_start_fails_measures_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real servers: the scheduled one ends at its start unless the overlap loop is off."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "words = sys.orig_argv\n"
        "if 'sglang.launch_server' in words and '--speculative-algorithm=DSPARK' in words:\n"
        "    if '--disable-overlap-schedule' not in words:\n"
        "        sys.exit('RuntimeError: injected')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    done = kit(tmp_path / "out", "--commit", "abc1234", "first")
    assert done.returncode == 1, "a default that does not start is a failure"
    found = json.loads((tmp_path / "out" / "first.partial.json").read_text())
    ladder = [row for row in found["metrics"]["rows"] if "ladder" in row]
    names = [(row["ladder"], "injected" in row.get("failed", "")) for row in ladder]
    fails = [(NAMES[0], True), (NAMES[1], True)]  # neither turns the overlap loop off
    assert names == [*fails, (NAMES[2], False)] * 2  # of both targets
    assert found["metrics"]["rung"] == NAMES[2]
    judge_rounds(found)


def unpack_names(part: Path) -> set[str]:
    with tarfile.open(part) as archive:
        return set(archive.getnames())


@pytest.mark.slow
@pytest.mark.server
def test_the_whole_stage_runs_the_gpus_side_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduled server rehearsed as in tests/rehearsal: overlap loop, planted step times."""
    (tmp_path / "overlap.yaml").write_text("cpu: {overlap: true}\n")
    monkeypatch.setenv("SGLANG_DSPARK_CONFIG", str(tmp_path / "overlap.yaml"))
    monkeypatch.setenv("DSPARK_REHEARSAL", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "rehearsal" / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # planted step times stay here
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")  # as a start on CUDA sets it
    found = dry_run(tmp_path / "out", "first")["first"]
    judge_rounds(found)
    judge_steps(found)
    judge_attending(found)
    tiers = [row for row in found["metrics"]["rows"] if "tier" in row]
    assert sum(row["drafted"] for row in tiers) > 0
    assert all(abs(row["startup_off"]) < 0.05 for row in tiers), "time there is planted"
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert any("verified" in line for line in lines), "the rehearsed device has run the passes"


@pytest.mark.slow
@pytest.mark.server
def test_servers_that_say_another_token_fail_the_stage(tmp_path: Path) -> None:
    """The table is changed behind the target's back, so every answer has wrong tokens."""
    table = ready(tmp_path / "home", TINY, "cpu") / "follows.npy"
    np.save(table, np.roll(np.load(table), 1))
    done = kit(tmp_path / "out", "--commit", "abc1234", "first")
    assert done.returncode == 1
    for server in ("plain", "dspark", "mtp1"):
        assert f"rounds: {server}, 2 users, greedy: " in done.stderr
    found = json.loads((tmp_path / "out" / "first.partial.json").read_text())
    assert any("sampling" in row for row in found["metrics"]["rows"])
