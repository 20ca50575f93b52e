"""The load generator against a server whose delays are known: what it must find, what may fail.

Times are large against the jitter of a busy machine; whether the client's own lag voids a cell is
therefore not asked here but in test_records.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client import runner
from sglang_dspark.loadtest.client.bodies import Api
from sglang_dspark.loadtest.client.cell import CellPlan, CellPrompt
from sglang_dspark.loadtest.client.records_file import read_records
from sglang_dspark.loadtest.client.runner import PLAN_FILE, CellResult, load_cell, run_cell
from sglang_dspark.loadtest.client.schedule import (
    Arrivals,
    Bursts,
    ClosedLoop,
    Lengths,
    Schedule,
    make_schedule,
)
from sglang_dspark.models.demo import ensure_demo_target
from tests.loadtest.timed_server import COUNTS, FIRST_S, STEP_S, STEPS, TOKENS
from tests.ports import free_ports
from tests.signals import heed_signals

USERS = 4
LOCUSTFILE = Path(runner.__file__).with_name("locustfile.py")
DECODE_S = (STEPS - 1) * STEP_S
CYCLE_S = FIRST_S + DECODE_S
TPOT_S = DECODE_S / (TOKENS - COUNTS[0])
WITHIN = 0.03  # a token too many among TOKENS is 0.04
FAULTS = {
    "fine": "ok",
    "@refuse": "http",
    "@cut": "cut",
    "@error": "error",
    "@abort": "error",
    "@babble": "malformed",
    "@hush": "timeout",
    "@nothing": "empty",
    "@boom": "error",
    "@bare": "error",
    "@unfinished": "cut",
    "@null": "ok",
    "@late": "ok",
    "@last": "ok",
    "@uncounted": "malformed",
    "@whole": "ok",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_ports()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.loadtest.timed_server", "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


def plan(
    arrivals: Arrivals, api: Api = "completions", texts: tuple[str, ...] = ("hello",)
) -> CellPlan:
    contents = [[{"role": "user", "content": t}] if api == "chat" else t for t in texts]
    prompts = tuple(
        CellPrompt(text, "math", content) for text, content in zip(texts, contents, strict=True)
    )
    groups = [[i] for i in range(len(texts))]
    schedule = make_schedule(arrivals, groups, Lengths(low=8, high=8), 0)
    return CellPlan(api, prompts, schedule, silence_s=5 * FIRST_S)


@dataclass(frozen=True)
class Measured:
    """A cell, and of each of its answers when the server really sent the chunks: [n, STEPS]."""

    cell: CellResult
    sent: np.ndarray


def measure(url: str, folder: Path) -> Measured:
    """A closed loop of four users, two requests each."""
    truth = f"{url}/truth"
    httpx.get(truth, trust_env=False)  # forget what was answered before
    cell = run_cell(plan(ClosedLoop(users=USERS, requests=2 * USERS)), url, folder)
    assert load_cell(folder) == cell
    return Measured(cell, np.array(httpx.get(truth, trust_env=False).json()))


def test_known_delays_are_recovered(url: str, tmp_path: Path) -> None:
    """One cell of five finds them: a busy machine may hold the client up in any one."""
    complaints = []
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        try:
            check_delays(measure(url, folder))
        except AssertionError as error:
            complaints.append(str(error))
        else:
            return
    pytest.fail("\n".join(complaints))


def check_delays(measured: Measured) -> None:
    found, sent = measured.cell.measurement, measured.sent
    assert (found.ok, found.failures, sent.shape) == (2 * USERS, {}, (2 * USERS, STEPS))
    assert {record.tokens for record in measured.cell.records} == {COUNTS}
    first, whole = np.median(sent[:, 0]), np.median(sent[:, -1])
    per_token = (sent[:, -1] - sent[:, 0]).mean() / (TOKENS - COUNTS[0])
    assert (first, whole) == pytest.approx((FIRST_S, CYCLE_S), rel=0.1)  # the server kept time
    assert found.ttft.p50 == pytest.approx(first, rel=WITHIN)
    assert found.seconds.p50 == pytest.approx(whole, rel=WITHIN)
    assert found.tpot.mean == pytest.approx(per_token, rel=WITHIN)
    assert found.itl.mean == pytest.approx(per_token, rel=WITHIN)
    assert found.itl.p99 == pytest.approx(STEP_S, rel=0.25)  # chunks of one token, the largest
    assert found.itl.p10 == pytest.approx(STEP_S / 3, rel=0.25)  # of three; of two it is / 2
    assert 1 / found.user_speed.p50 == pytest.approx(per_token, rel=WITHIN)
    expected = USERS * TOKENS / sent[:, -1].mean()
    assert found.tokens_per_s == pytest.approx(expected, rel=WITHIN)
    assert found.tau == pytest.approx(1 + (TOKENS - STEPS) / (STEPS - 1))


@pytest.mark.slow
def test_sglangs_own_benchmark_agrees(url: str, tmp_path: Path) -> None:
    """Both in turn, again if they differ: a machine that hesitates once slows one of them alone."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        cell = run_cell(plan(ClosedLoop(users=USERS, requests=2 * USERS)), url, folder)
        ours = cell.measurement
        theirs = sglangs_own(url, folder / "out.jsonl")
        assert theirs["completed"] == ours.ok == 2 * USERS
        assert theirs["total_output_tokens"] == ours.tokens
        pairs = {
            "median_ttft_ms": 1e3 * ours.ttft.p50,
            "median_tpot_ms": 1e3 * ours.tpot.p50,
            "mean_itl_ms": 1e3 * ours.itl.mean,
            "median_itl_ms": 1e3 * ours.itl.p50,
            "mean_e2e_latency_ms": 1e3 * ours.seconds.mean,
            "output_throughput": ours.tokens_per_s,
        }
        found = {name: theirs[name] for name in pairs}
        if found == pytest.approx(pairs, rel=0.05):
            break
    assert found == pytest.approx(pairs, rel=0.05)


def sglangs_own(url: str, out: Path) -> dict[str, Any]:
    """Return `sglang.bench_serving`'s report of the same load."""
    options = {
        "backend": "sglang",
        "base-url": url,
        "model": "default",
        "tokenizer": str(ensure_demo_target()),
        "dataset-name": "random-ids",
        "num-prompts": str(2 * USERS),
        "random-input-len": "8",
        "random-output-len": str(TOKENS),
        "random-range-ratio": "1",
        "max-concurrency": str(USERS),
        "ready-check-timeout-sec": "0",
        "warmup-requests": "0",
        "output-file": str(out),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "tests.loadtest.bench_serving", "--disable-tqdm", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_open_loop_counts_from_the_scheduled_time(url: str, tmp_path: Path) -> None:
    bursts = Bursts(size=3, every_s=0.5, count=2)
    result = run_cell(plan(bursts, "generate"), url, tmp_path, processes=2)
    found = result.measurement
    assert (found.ok, result.header.workers) == (6, 2)
    for record in result.records:
        assert record.scheduled is not None
        assert record.sent is not None
        assert record.sent >= record.scheduled
        assert record.ttft == pytest.approx(record.at[0] - record.scheduled)
    assert FIRST_S <= found.ttft.p50 < 2 * FIRST_S  # a burst shares the core
    assert found.tpot.p50 == pytest.approx(TPOT_S, rel=0.5)
    assert {record.tokens for record in result.records} == {COUNTS}


def test_every_failure_is_recorded(url: str, tmp_path: Path) -> None:
    everything = plan(ClosedLoop(users=len(FAULTS), requests=len(FAULTS)), "chat", tuple(FAULTS))
    result = run_cell(everything, url, tmp_path)
    records = {record.prompt: record for record in result.records}
    assert {prompt: record.outcome for prompt, record in records.items()} == FAULTS
    assert (records["@refuse"].status, records["@refuse"].error) == (503, "busy")
    assert records["@error"].error == "out of memory"
    assert (records["@boom"].error, records["@bare"].error) == ("boom", "bare")
    assert records["@unfinished"].error == "the stream ended without a finish_reason"
    assert "counts no tokens in its stream" in records["@uncounted"].error
    assert "cannot read the event '{half' (JSONDecodeError: " in records["@babble"].error
    assert sum(records["@cut"].tokens) == sum(COUNTS[: STEPS // 2])
    assert result.measurement.ok == sum(outcome == "ok" for outcome in FAULTS.values())
    assert sum(result.measurement.failures.values()) == len(FAULTS) - result.measurement.ok


def test_a_usage_at_the_end_counts_by_chunks_of_text(url: str, tmp_path: Path) -> None:
    """The chunks of `timed_server` have as many characters as tokens: the spread is close."""
    forms = ("fine", "@late", "@last", "@whole")
    result = run_cell(plan(ClosedLoop(users=4, requests=4), "chat", forms), url, tmp_path)
    records = {record.prompt: record for record in result.records}
    assert {record.total_tokens for record in result.records} == {TOKENS}
    for form in forms[:3]:
        differences = [a - b for a, b in zip(records[form].tokens, COUNTS, strict=True)]
        assert max(map(abs, differences)) <= (0 if form == "fine" else 1)
    for form in forms[1:3]:
        assert records[form].ttft < FIRST_S + 3 * STEP_S  # not that of the usage, at the end
        assert 1 / records[form].tpot == pytest.approx(1 / records["fine"].tpot, rel=0.3)
    assert records["@whole"].tokens == (TOKENS,)
    assert records["@whole"].tpot != records["@whole"].tpot  # one chunk has no speed
    assert all(record.loops and record.asked == 8 for record in result.records)


def test_requests_are_broken_off_as_planned(url: str, tmp_path: Path) -> None:
    whole = plan(ClosedLoop(users=3, requests=3), texts=("fine", "aborted", "left"))
    ways = [{}, {"ends": "abort", "extra": {"rid": "mine"}}, {"ends": "leave"}]
    prompts = tuple(
        replace(prompt, ends_after=6, **way)  # type: ignore[arg-type]
        for prompt, way in zip(whole.prompts, ways, strict=True)
    )
    result = run_cell(replace(whole, prompts=prompts), url, tmp_path)
    records = {record.prompt: record for record in result.records}
    assert {prompt: record.outcome for prompt, record in records.items()} == {
        "fine": "ok",
        "aborted": "aborted",
        "left": "left",
    }
    assert records["left"].total_tokens == sum(COUNTS[:3])  # 6 tokens are there after three chunks
    assert 6 < records["aborted"].total_tokens < TOKENS
    assert (result.measurement.ok, result.measurement.failures) == (1, {})


def test_no_server_is_counted_and_voids_the_cell(tmp_path: Path) -> None:
    unused = f"http://127.0.0.1:{free_ports()}"
    result = run_cell(plan(ClosedLoop(users=2, requests=4)), unused, tmp_path)
    assert result.measurement.failures == {"connection": 4}
    assert "no request came through: 4 connection (Connect" in result.measurement.void


def test_the_end_of_the_cell_leaves_nothing_out(url: str, tmp_path: Path) -> None:
    whole = plan(ClosedLoop(users=2, requests=20))
    short = CellPlan(whole.api, whole.prompts, whole.schedule, limit_s=(CYCLE_S + 2 * CYCLE_S) / 2)
    found = run_cell(short, url, tmp_path).measurement
    assert found.requests == 20
    assert found.ok == 2
    assert found.failures == {"cut": 2, "unsent": 16}


def test_locust_itself_runs_the_file_without_a_plan(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--host", url]
    options = ["--users", "2", "--run-time", "20s", "--records", str(tmp_path), "--only-summary"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "chat" in done.stderr + done.stdout  # locust's own table
    _, records = read_records(tmp_path / "records-0.parquet")
    assert {record.outcome for record in records} <= {"ok", "cut"}
    assert any(record.ok for record in records)


def test_two_cells_at_a_time_listen_on_the_loopback_alone(url: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    listening: set[str] = set()

    def look() -> None:
        for folder in folders:
            for number in generators(folder):
                with contextlib.suppress(psutil.NoSuchProcess):
                    sockets = psutil.Process(number).net_connections("inet")
                    listening.update(s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN)

    def cell(folder: Path) -> CellResult:
        load = plan(ClosedLoop(users=2, requests=4))
        return run_cell(load, url, folder, processes=2, on_poll=look)

    with ThreadPoolExecutor(2) as pool:
        cells = list(pool.map(cell, folders))
    assert [[r.outcome for r in cell.records] for cell in cells] == [["ok"] * 4] * 2
    assert listening == {"127.0.0.1"}


def test_ctrl_c_leaves_no_process(url: str, tmp_path: Path) -> None:
    plan(ClosedLoop(users=2, requests=200)).save(tmp_path / PLAN_FILE)
    code = (
        "import sys; from pathlib import Path\n"
        "from sglang_dspark.loadtest.client.cell import CellPlan\n"
        "from sglang_dspark.loadtest.client.runner import run_cell\n"
        "folder = Path(sys.argv[2]); plan = CellPlan.load(folder / 'plan.json')\n"
        "poll = lambda: print('up', flush=True)\n"
        "run_cell(plan, sys.argv[1], folder, processes=2, on_poll=poll)\n"
    )
    outer = subprocess.Popen(
        [sys.executable, "-c", code, url, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=heed_signals,
    )
    assert outer.stdout is not None
    for _ in range(25):  # 2.5 s: time to import locust and to fork
        assert outer.stdout.readline() == "up\n"
    assert generators(tmp_path) != []
    outer.send_signal(signal.SIGINT)
    outer.wait(timeout=60)
    assert outer.returncode != 0
    deadline = time.monotonic() + 5
    while generators(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert generators(tmp_path) == []


def generators(folder: Path) -> list[int]:
    """Processes, zombies aside, whose command line names the folder's records."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:  # it has ended meanwhile
                continue
            if "--records" in words and str(folder) in words:
                found.append(int(entry.name))
    return found


def test_a_generator_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="load generator failed with code"):
        run_cell(plan(ClosedLoop(users=1, requests=1)), "--no-such-option", tmp_path)


def test_plans_are_kept_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for api in ("chat", "generate"):
        made = plan(Bursts(size=2, every_s=1, count=2), api)  # type: ignore[arg-type]
        made.save(path)
        assert CellPlan.load(path) == made
    with pytest.raises(DSparkError, match="cannot read"):
        CellPlan.load(tmp_path / "absent.json")
    for text in ("{", "[]", '{"api": "chat"}'):
        path.write_text(text)
        with pytest.raises(DSparkError, match="no cell plan"):
            CellPlan.load(path)
    with pytest.raises(DSparkError, match="no interface"):
        CellPlan("soap", made.prompts, made.schedule)  # type: ignore[arg-type]
    with pytest.raises(DSparkError, match="no request"):
        CellPlan("chat", made.prompts, Schedule((), 1))
    with pytest.raises(DSparkError, match="does not have"):
        CellPlan("chat", (), made.schedule)
