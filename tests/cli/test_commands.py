"""The commands as a user calls them: bad input is one line on stderr and exit status 1."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang_dspark.drafter import save_drafter
from sglang_dspark.models.demo import ensure_demo_target
from sglang_dspark.models.drafters import shipped_drafter_path
from tests.drafter.helpers import tiny_drafter
from tests.ports import free_ports
from tests.signals import heed_signals


@pytest.fixture
def drafts_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers draft by confidence alone: beside busy neighbours no draft may pay."""
    config = tmp_path / "threshold.yaml"
    config.write_text("schedule: {threshold: 0.3}\n")
    monkeypatch.setenv("SGLANG_DSPARK_CONFIG", str(config))


def dspark(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_dspark.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=900)


@pytest.mark.parametrize("command", [("demo",), ("bench", "serve")])
def test_busy_port(tmp_path: Path, command: Sequence[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        out = dspark(*command, "--port", str(port), cwd=tmp_path)
    assert out.returncode == 1
    assert out.stderr.startswith(
        f"dspark: cannot listen on 127.0.0.1:{port} (Address already in use)"
    )
    assert len(out.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    """The target is its config.json alone, so SGLang itself complains; its words must reach the
    user."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    made = tiny_drafter()
    save_drafter(made, drafter)
    target.mkdir()
    c = made.config
    sizes = {"hidden_size": c.hidden_size, "vocab_size": c.vocab_size, "num_hidden_layers": 4}
    (target / "config.json").write_text(json.dumps(sizes))
    arguments = ["--drafter", str(drafter), "--target", str(target), "--device", "cpu"]
    out = dspark("demo", "--port", str(free_ports(3)), *arguments, cwd=tmp_path)
    assert out.returncode == 1
    assert "python -m sglang.launch_server --model-path" in out.stdout.replace("\n", " ")
    last = out.stderr.splitlines()[-1]
    assert last.startswith("dspark: the dspark server ended with status")
    assert "(log: runs/" in last


@pytest.mark.server
@pytest.mark.usefixtures("drafts_are_verified")
def test_demo_from_start_to_end(tmp_path: Path) -> None:
    port = free_ports(3)
    arguments = ["--port", str(port), "--per-domain", "1", "--max-new-tokens", "24"]
    arguments += ["--no-sweep"]
    out = dspark("demo", *arguments, "--json", "demo.json", cwd=tmp_path)
    assert out.returncode == 0, out.stdout + out.stderr
    metrics = json.loads((tmp_path / "demo.json").read_text())["metrics"]
    rows = metrics["domains"]
    assert list(rows) == ["math", "code", "chat", "overall"]
    assert rows["overall"]["prompts"] == 3
    assert rows["overall"]["tau"] > 1.0  # drafts were really accepted
    assert len(rows["overall"]["acceptance"]) == metrics["gamma"]
    assert rows["overall"]["identical"] == 3
    for entry in metrics["answers"]:
        assert entry["tokens"] == 24
        assert entry["text"].replace("\n", "")[:20] in out.stdout.replace("\n", "").replace(
            "«", ""
        ).replace("»", "")
    assert_port_is_free(port)


@pytest.mark.slow
@pytest.mark.server
def test_bench_serve_writes_the_contract(tmp_path: Path) -> None:
    arguments = ["--port", str(free_ports(3)), "--concurrency", "1,2", "--repeats", "2"]
    arguments += ["--max-new-tokens", "8", "--out", "serve.json", "--json"]
    out = dspark("bench", "serve", *arguments, cwd=tmp_path)
    assert out.returncode == 0, out.stdout + out.stderr
    document = json.loads(out.stdout)
    assert document == json.loads((tmp_path / "serve.json").read_text())
    metrics = document["metrics"]
    assert metrics["speedup_vs_plain_c1"] > 0
    assert metrics["tau_demo"] >= 1.0  # 1 where the machine is too busy for drafts to pay
    assert [row["concurrency"] for row in metrics["by_concurrency"]] == [1, 2]
    for row in metrics["by_concurrency"]:
        assert row["speedup"] > 0
        assert row["speedup_ci95"] is None  # of two repeats
        assert [len(each) for each in row["repeats"].values()] == [2] * 4
        assert row["plain"] > 0
        assert row["dspark"] > 0
    step = metrics["step"]
    assert step["ratio"] == pytest.approx(step["verify_ms"] / step["plain_decode_ms"], rel=0.5)


@pytest.mark.slow
@pytest.mark.server
def test_ctrl_c_stops_the_server(tmp_path: Path) -> None:
    port = free_ports(3)
    command = [sys.executable, "-m", "sglang_dspark.cli.main", "demo", "--port", str(port)]
    with (tmp_path / "out").open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=tmp_path, preexec_fn=heed_signals
        )
        deadline = time.monotonic() + 300
        while "tokens/s" not in (tmp_path / "out").read_text():  # the first answer is there
            assert process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.5)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(120) == 130
    text = (tmp_path / "out").read_text()
    assert text.splitlines()[-1] == "dspark: stopped; no server is left running"
    assert "Traceback" not in text
    assert_port_is_free(port)


def assert_port_is_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


@pytest.fixture(scope="module", autouse=True)
def _models_for_server_tests(request: pytest.FixtureRequest) -> None:
    """Build the demo target once, outside the timed commands, and find the shipped drafter."""
    if any(item.get_closest_marker("server") for item in request.session.items):
        ensure_demo_target()
        shipped_drafter_path()
