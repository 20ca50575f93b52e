"""A server process from start to end, with a real child: no port clash, orphan or riddle."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.servers.server import (
    ServerProcess,
    ServerSpec,
    run_directory,
    stop_on_signals,
)
from sglang_dspark.ports import require_free_port
from tests.ports import free_ports
from tests.signals import heed_signals

MODULE = "tests.loadtest.small_server"
ROOT = Path(__file__).parents[2]


def spec(*arguments: str) -> ServerSpec:
    environment = {"PYTHONPATH": str(ROOT)}
    return ServerSpec("small", Path("m"), free_ports(), arguments, "127.0.0.1", environment, MODULE)


def child_of(server: ServerProcess) -> int:
    return int(server.log_tail().split("child ")[1].split()[0])


def running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_from_start_to_end(tmp_path: Path) -> None:
    ticks: list[float] = []
    with ServerProcess(spec("--delay", "1.0"), tmp_path).start() as server:
        assert server.wait_ready(30, ticks.append) >= 1.0
        assert ticks == sorted(ticks)
        child = child_of(server)
        assert server.alive()
        assert running(child)
        with pytest.raises(
            DSparkError, match=rf"cannot listen on 127\.0\.0\.1:{server.spec.port} .*in use"
        ):
            require_free_port("127.0.0.1", server.spec.port)
        server.pause()
        deadline = time.monotonic() + 30.0
        while {cpu_state(server.pid), cpu_state(child)} != {"T"}:
            assert time.monotonic() < deadline, "not stopped"
            time.sleep(0.05)
        server.resume()
        assert server.wait_ready(10) < 5
        server.pause()  # a paused server must end as well
    assert not server.alive()
    assert not running(child)
    server.stop()  # a second time does nothing
    require_free_port("127.0.0.1", server.spec.port)


def test_busy_port_is_seen_before_launch(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        busy = ServerSpec("small", Path("m"), listener.getsockname()[1], module=MODULE)
        with pytest.raises(DSparkError, match="choose another --port") as error:
            ServerProcess(busy, tmp_path).start()
    assert "\n" not in str(error.value)
    with pytest.raises(DSparkError, match=r"port 70000 .* not in 1\.\.65535"):
        ServerSpec("small", Path("m"), 70000)


def test_a_server_that_dies_is_reported_with_its_complaint(tmp_path: Path) -> None:
    server = ServerProcess(spec("--die"), tmp_path).start()
    with pytest.raises(DSparkError, match=r"status 3 .*: ValueError: hidden size 64 is not 576"):
        server.wait_ready(30)
    assert "more noise" in server.log_tail(1)


def test_a_server_that_is_never_ready_is_stopped(tmp_path: Path) -> None:
    server = ServerProcess(spec("--delay", "600"), tmp_path).start()
    with pytest.raises(DSparkError, match="not ready after 3 s"):
        server.wait_ready(3)
    assert not server.alive()


SCRIPT = """
import sys, time
from pathlib import Path
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec, stop_on_signals
spec = ServerSpec("small", Path("m"), int(sys.argv[1]), module="tests.loadtest.small_server")
with stop_on_signals():
    server = ServerProcess(spec, Path(sys.argv[2])).start()
    server.wait_ready(60)
    print(server.pid, server.log_tail().split("child ")[1].split()[0], flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_orphans_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """The script holds no `with` block around the server: leaving at all must stop it."""
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(free_ports()), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        preexec_fn=heed_signals,
    )
    assert script.stdout is not None
    pids = [int(pid) for pid in script.stdout.readline().split()]
    assert all(map(running, pids))
    os.kill(script.pid, number)
    assert script.wait(30) != 0
    script.stdout.close()
    assert len(pids) == 2
    assert not any(map(running, pids))


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(SystemExit):
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_command_can_be_copied() -> None:
    line = ServerSpec(
        "x", Path("a b"), 80, ("--device", "cpu"), environment={"K": "1 2"}
    ).shell_line()
    assert line == (
        "K='1 2' python -m sglang.launch_server --model-path 'a b' --host 127.0.0.1 --port 80 "
        "--device cpu"
    )


def test_run_directories_do_not_collide(tmp_path: Path) -> None:
    made = {run_directory(tmp_path / "runs") for _ in range(3)}
    assert len(made) == 3
    assert all(path.is_dir() for path in made)
