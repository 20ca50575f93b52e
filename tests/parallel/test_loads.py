"""Load from several machines by locust's own workers: each request arrives and is counted once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.loadtest.client.records_file import read_records
from tests.loadtest.timed_server import TOKENS
from tests.parallel.documented import documented
from tests.parallel.machines import ADDRESSES, Machine, lacking, two_machines
from tests.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parallel")]

ROOT = Path(__file__).resolve().parents[2]
SECONDS, LIMIT_S = "12s", 240


@dataclass(frozen=True)
class Place:
    """The sender of a load: a machine of its own, or a process of this one."""

    machine: Machine | None = None

    def start(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if self.machine is not None:
            return self.machine.start(words, log, environment)
        with log.open("wb") as output:
            return subprocess.Popen(
                words, stdout=output, stderr=output, env=os.environ | environment
            )

    def truth(self, url: str) -> list[list[float]]:
        """Return the times that the server has sent since the last call."""

        def ask() -> list[list[float]]:
            sent: list[list[float]] = httpx.get(f"{url}/truth", trust_env=False).json()
            return sent

        return ask() if self.machine is None else self.machine.call(ask)


@contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """End the processes with the block, even after a failure."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(places: Sequence[Place], address: str, folder: Path) -> list[list[float]]:
    """Server and master at the first place, a worker at each; what the server sent."""
    url = f"http://{address}:{free_ports() if places[0].machine is None else 30000}"
    meeting = str(free_ports())
    filled = {"loads": str(folder / "loads"), "60s": SECONDS, ADDRESSES[0]: address}
    master = documented("load-master", **filled, **{f"http://{ADDRESSES[0]}:30000": url})
    worker = documented("load-worker", **filled)
    if places[0].machine is None:  # locust's own port may be another test's
        master += ["--master-bind-port", meeting]
        worker += ["--master-port", meeting]
    server = [sys.executable, "-m", "tests.loadtest.timed_server", "--host", address]
    server += ["--port", url.rpartition(":")[2]]
    running: list[subprocess.Popen[bytes]] = []
    with ended(running):
        running.append(places[0].start(server, folder / "server.log"))
        running.append(places[0].start(master, folder / "master.log"))
        for number, place in enumerate(places):
            running.append(place.start(worker, folder / f"worker-{number}.log"))
        for process in running[1:]:
            assert process.wait(LIMIT_S) == 0, (folder / "master.log").read_text()[-3000:]
        return places[0].truth(url)


@pytest.mark.parametrize(
    "several",
    [
        pytest.param(False, id="processes"),
        pytest.param(
            True,
            id="machines",
            marks=pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
        ),
    ],
)
def test_each_request_of_two_workers_is_counted_once(several: bool, tmp_path: Path) -> None:
    with ExitStack() as stack:
        places: list[Place] = [Place(), Place()]
        address = "127.0.0.1"
        if several:
            places = [Place(machine) for machine in stack.enter_context(two_machines())]
            address = ADDRESSES[0]
        sent = run(places, address, tmp_path)
    files = [read_records(path) for path in sorted((tmp_path / "loads").glob("*.parquet"))]
    assert [(header.worker, header.workers) for header, _ in files] == [(0, 2), (1, 2)]
    assert all(any(record.ok for record in records) for _, records in files)
    records = [record for _, own in files for record in own]
    assert max(Counter(record.index for record in records).values()) == 1
    outcomes = Counter(record.outcome for record in records)
    assert outcomes.keys() <= {"ok", "cut"}
    # Whole answers, and those that were cut before their last byte was read.
    assert outcomes["ok"] <= len(sent) <= outcomes["ok"] + outcomes["cut"]
    shown = CliRunner().invoke(app, ["report", "--records", str(tmp_path / "loads")])
    assert shown.exit_code == 0, shown.output
    assert f"{len(records)} requests of 2 workers" in shown.output
    assert f"{outcomes['ok']} answered" in shown.output
    assert f"{outcomes['ok'] * TOKENS} tokens" in shown.output
