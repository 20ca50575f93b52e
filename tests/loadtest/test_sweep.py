"""Test the command `dspark sweep` on stubs of SGLang servers: stopped, killed, resumed.

The machine may be busy: nothing here asks how fast anything was.
"""

from __future__ import annotations

import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from sglang_dspark.cli._demo_sweep import sweep_and_report
from sglang_dspark.cli.sweep import sweep
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.records_file import read_records
from sglang_dspark.loadtest.servers.fleet import LOGS, end_writers
from sglang_dspark.loadtest.servers.server import ServerProcess
from sglang_dspark.loadtest.sweep import run_dir
from sglang_dspark.loadtest.sweep.config import load_sweep
from sglang_dspark.loadtest.sweep.run_dir import Cell
from sglang_dspark.loadtest.sweep.setup import choose_arms
from tests.ports import free_ports
from tests.signals import heed_signals

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 300.0
SLOW = {"about": "a step takes 20 ms"}
FAST = {"about": "a step takes 10 ms", "arguments": ["--step=0.01"]}
HANGING = {"about": "serves one cell", "arguments": ["--step=0.01", "--flushes=1"]}
NEVER = {"about": "serves no cell", "arguments": ["--flushes=0"]}
DYING = {"about": "dies in its third answer", "arguments": ["--die-after=3"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Arms, a target with a chat template, and a sweep of them in sweep.yaml."""
    (tmp_path / "arms").mkdir()
    arms = {"slow": SLOW, "fast": FAST, "dying": DYING, "hanging": HANGING, "never": NEVER}
    for name, arm in arms.items():
        (tmp_path / "arms" / f"{name}.yaml").write_text(yaml.safe_dump(arm))
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    write_sweep(tmp_path)
    return tmp_path


def write_sweep(folder: Path, **other: Any) -> None:
    sweep = {
        "arms": ["slow", "fast"],
        "arms_folder": "arms",
        "baseline": "slow",
        "compare": {"over": "fast", "under": "slow"},
        "target": str(folder / "target"),
        "device": "cpu",
        "launcher": "tests.loadtest.sweep_server",
        "port": free_ports(3),
        "mix": "math",
        "answer_tokens": {"low": 10, "high": 14},
        "concurrency": [2],
        "trials": 2,
        "seconds": 0.5,
        "warm_up": False,
        "retries": 0,
        "sample_s": 0.1,
        "slas": [{"speed_p50": 10}],
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump({**sweep, **other}))


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sglang_dspark.cli.main", "sweep"]
    return subprocess.Popen(
        [*command, "--config", "sweep.yaml", "--out", "run", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_signals,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=LONG_S)
    return process.returncode, out


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def left_running(folder: Path) -> list[str]:
    """Command lines of living processes of this sweep: servers, their children, generators."""
    port = yaml.safe_load((folder / "sweep.yaml").read_text())["port"]
    marks = [f"--port\0{port}", f"--port\0{port + 1}", f"child of {port}", str(folder)]
    marks += [f"child of {port + 1}"]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_text()
            except OSError:  # it has ended meanwhile
                continue
            if any(mark in line for mark in marks):
                found.append(line.replace("\0", " "))
    return found


def lost(cell: Cell) -> bool:
    """Return whether it is void by the sweep's fault; on a busy machine the client may be late."""
    return bool(cell.void) and not cell.void.startswith("the client was late")


def cell_files(folder: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (folder / "run" / "cells").glob("*.json")}


def test_stopped_killed_and_resumed(folder: Path) -> None:
    process = start(folder)
    wait_for(lambda: (folder / "run" / "load" / "pilot-slow-2" / "load.log").exists())
    assert len(left_running(folder)) >= 4  # two servers and their children
    process.send_signal(signal.SIGINT)
    status, out = ended(process)
    assert (status, "no server is left running" in out) == (130, True), out
    assert left_running(folder) == []

    process = start(folder)
    wait_for(lambda: cell_files(folder))
    process.kill()
    process.communicate()
    wait_for(lambda: not left_running(folder))
    before = cell_files(folder)
    plan = run_dir.read_run(folder / "run").plan
    assert 0 < len(before) < len(plan) == 4

    condition = "fast>=slow@speed-2:100"
    status, out = ended(start(folder, "--require", condition, "--json", "sweep.json"))
    assert (status, f"{condition} is not shown" in out or "cannot be judged" in out) == (2, True)
    assert left_running(folder) == []
    after = cell_files(folder)
    assert {name: after[name] for name in before} == before
    assert sorted(after) == sorted(plan)
    check_whole(folder / "run", plan)
    metrics = json.loads((folder / "sweep.json").read_text())["metrics"]
    assert metrics["complete"] is True
    assert metrics["matched_speed_ratio_vs_slow"].keys() >= {"low", "mid", "high"}
    assert metrics["by_concurrency"][0]["concurrency"] == 2

    write_sweep(folder, seed=1)
    status, out = ended(start(folder))
    assert (status, "with another port, seed" in out or "with another seed" in out) == (1, True)


def check_whole(run: Path, plan: list[str]) -> None:
    """Everything that a finished sweep promises."""
    info, cells = run_dir.read_run(run), run_dir.read_cells(run)
    assert [cell.name for cell in cells] == plan
    assert info.ended is not None
    assert info.pilot is not None
    assert [arm.name for arm in info.arms] == ["slow", "fast"]
    met = {(cell.trial, cell.fingerprint) for cell in cells}
    assert len(met) == 2  # the same requests for all arms, others in each trial
    for cell in cells:
        assert (cell.ok, cell.failures, cell.disagreements) == (cell.requests, {}, [])
        assert cell.tau == pytest.approx(2.0)
        _, records = read_records(run / "cells" / f"{cell.name}.parquet")
        assert sum(record.total_tokens for record in records) == cell.tokens
    assert any(cell.timeline for cell in cells)
    summary = run_dir.read_summary(run)
    assert "trials are too few to tell" in summary.verdict or "No winner" in summary.verdict


def test_what_a_killed_sweep_has_left_is_ended(tmp_path: Path) -> None:
    log, other = tmp_path / "dspark.log", tmp_path / "plain.log"
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with log.open("w") as ours, other.open("w") as theirs:
        left = subprocess.Popen(sleep, stdout=ours)
        strange = subprocess.Popen(sleep, stdout=theirs)
    end_writers(log)
    assert left.wait(timeout=LONG_S) == -signal.SIGKILL
    assert strange.poll() is None
    strange.kill()
    strange.wait()


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    """A server that runs already, on a port of its own."""
    port = free_ports(1)
    command = [sys.executable, "-m", "tests.loadtest.sweep_server", "--host", "127.0.0.1"]
    server = subprocess.Popen([*command, "--port", str(port)], cwd=ROOT, stdout=subprocess.DEVNULL)
    yield f"http://127.0.0.1:{port}/"
    server.kill()
    server.wait()


def test_a_server_that_dies(folder: Path, url: str) -> None:
    arms = {"arms": ["slow", "fast", "dying"], "urls": {"slow": url}, "servers": "in-turn"}
    write_sweep(folder, **arms, trials=1)
    status, out = ended(start(folder))
    assert status == 3, out
    assert "RuntimeError: out of memory, as asked" in out
    assert "the dying server died in cell dying-closed-2-0" in out
    cell = run_dir.read_cell(folder / "run", "dying-closed-2-0")
    assert cell is not None
    assert cell.died
    assert "the server died" in cell.void
    assert "out of memory" in cell.log_tail
    assert sum(cell.failures.values()) + cell.ok == cell.requests
    assert {"cut", "connection"} >= set(cell.failures)

    status, out = ended(start(folder, "--on-death", "continue"))
    assert status == 0, out  # the others were kept; dying's was measured again and has died again
    assert len(cell_files(folder)) == 3
    assert "dying-closed-2-0 is void: the server died" in out
    assert left_running(folder) == []
    by_name = {cell.arm: cell for cell in run_dir.read_cells(folder / "run")}
    assert by_name["slow"].ok == by_name["slow"].requests == by_name["fast"].ok
    records = {arm.name: arm for arm in run_dir.read_run(folder / "run").arms}
    assert (records["slow"].command, records["slow"].ready_s) == (url.rstrip("/"), None)
    assert records["fast"].ready_s is not None


def test_a_sweep_of_servers_that_run_already(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `dspark demo` ends: one server is reused, the other started, the report written."""
    monkeypatch.chdir(ROOT)  # where the stand-in's module is found
    monkeypatch.setattr("sglang_dspark.loadtest.client.measure.MAX_LAG_MS", math.inf)
    write_sweep(folder, trials=1)
    config = load_sweep(folder / "sweep.yaml")
    run, shown = folder / "run", io.StringIO()
    (slow,) = [arm for arm in choose_arms(config) if arm.name == "slow"]
    spec = slow.server(folder / "target", {}, config.port, "cpu", run)
    server = ServerProcess(spec.launched_by(config.launcher), run / LOGS).start()
    server.wait_ready(LONG_S)
    number = server.pid
    sweep_and_report(Console(file=shown, width=100), config, {"slow": server}, run)
    said = shown.getvalue()
    assert "starting the fast server" in said
    assert "starting the slow server" not in said
    assert "Of one trial a load there is no interval" in said
    assert str(run / "report.html") in said.replace("\n", "")
    assert "Throughput against speed per user" in (run / "report.html").read_text()
    cells = run_dir.read_cells(run)
    assert [c.ok for c in cells] == [c.requests for c in cells]
    assert [cell.void for cell in cells] == ["", ""]
    arms = {arm.name: arm for arm in run_dir.read_run(run).arms}
    assert arms["slow"].ready_s == server.ready_after
    assert not Path(f"/proc/{number}").exists()
    assert left_running(folder) == []


def test_a_server_that_hangs_is_started_anew(folder: Path) -> None:
    against = {"over": "hanging", "under": "slow"}
    write_sweep(folder, arms=["slow", "hanging", "never"], compare=against)
    status, out = ended(start(folder, "--on-death", "continue"))
    assert status == 0, out
    assert out.count("once more with a new server") == 1 + 2  # hanging's second cell, never's two
    assert out.count("is skipped: the server at") == 2
    cells = run_dir.read_cells(folder / "run")
    assert sorted(cell.arm for cell in cells) == ["hanging"] * 2 + ["slow"] * 2
    assert [cell.void for cell in cells if lost(cell)] == []
    assert [cell.ok for cell in cells] == [cell.requests for cell in cells]
    assert "2 of 6 cells were not measured" in out
    assert left_running(folder) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": ["slow", "fats"], "compare": None}, "no arm 'fats'"),
        ({"slas": [{"speed_p50": -1}]}, "SLA limits must be above 0"),
        ({"slas": [{}]}, "an SLA needs a speed floor"),
        ({"mix": "empty.jsonl"}, "empty.jsonl"),
        ({"concurrency": []}, "concurrency: List should have at least 1 item"),
        ({"concurrency": [2, 1]}, "ascending"),
        ({"compare": {"over": "fast", "under": "plain"}}, "plain is not among the arms"),
        ({"speed": 1}, "speed: no such field"),
        ({"golden": "smoke"}, "golden brings its models; leave target, drafters and deeper out"),
        ({"golden": "smoke", "target": "demo", "deeper": 2}, "golden brings its models"),
        ({"golden": "gold", "target": "demo"}, "no file gold"),
        ({"open": {"arrivals": [{"kind": "soap"}]}}, "soap"),
        ({"open": {"arrivals": [{"kind": "trace", "path": "none"}]}}, "cannot read the trace none"),
        ({"target": "nowhere"}, "no model at nowhere"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    (folder / "empty.jsonl").write_text("\n")
    write_sweep(folder, **change)
    monkeypatch.chdir(folder)
    with pytest.raises(DSparkError) as error:
        sweep(Path("sweep.yaml"), out=Path("run"))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path("run").exists()


def test_a_wrong_condition_is_named(folder: Path) -> None:
    for condition, said in (("fast>slow", "not of the form"), ("fast>=x@matched:1", "no arm x")):
        with pytest.raises(DSparkError, match=said):
            sweep(folder / "sweep.yaml", require=[condition])
    with pytest.raises(DSparkError, match="no `smoke:` section"):
        sweep(folder / "sweep.yaml", smoke=True)


def test_a_busy_port_ends_with_status_1(folder: Path) -> None:
    port = yaml.safe_load((folder / "sweep.yaml").read_text())["port"]
    with socket.create_server(("127.0.0.1", port + 1)):
        status, out = ended(start(folder))
    assert status == 1
    assert out.startswith(f"dspark: cannot listen on 127.0.0.1:{port + 1}")
    assert len(out.splitlines()) == 1
    assert not (folder / "run").exists()
