"""Run one cell: start locust headless as a child process, wait, read its records.

Locust runs in its own process because importing it patches sockets and threads permanently. The
child has its own process group and is ended on every exit of this process, Ctrl-C included.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.cell import CellPlan
from sglang_dspark.loadtest.client.measure import Measurement, measure_cell, merge
from sglang_dspark.loadtest.client.records import Header, Record
from sglang_dspark.loadtest.client.records_file import SUFFIX, read_records
from sglang_dspark.loadtest.servers.server import tied
from sglang_dspark.loadtest.sweep.run_dir import Cores
from sglang_dspark.ports import free_port

HOST = "127.0.0.1"
PLAN_FILE = "plan.json"
LOG_FILE = "load.log"
RECORDS = f"records-*{SUFFIX}"
_START_S = 60.0  # import of locust and spawning of users, on a busy machine
_POLL_S = 0.1
_GRACE_S = 5.0


@dataclass(frozen=True)
class CellResult:
    """A measured cell: header, records of its requests, and figures."""

    header: Header
    records: tuple[Record, ...]
    measurement: Measurement


def run_cell(
    plan: CellPlan,
    url: str,
    directory: Path,
    *,
    processes: int = 1,
    on_poll: Callable[[], None] | None = None,
    cores: Cores | None = None,
) -> CellResult:
    """Send a cell's requests to a running server. Plan, records and log stay in `directory`.

    processes: load-generating processes; more than one if a single one is too slow. on_poll: called
    several times a second (progress, or to raise when the server has died). cores: cores and
    scheduling of the generator. Failed requests are in the result. Raises DSparkError if the
    generator itself fails.
    """
    for old in directory.glob(RECORDS):
        old.unlink()
    plan.save(directory / PLAN_FILE)
    log = directory / LOG_FILE
    with log.open("wb") as output:
        child = subprocess.Popen(
            tied(_command(plan, url, directory, processes)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={k: v for k, v in os.environ.items() if not k.startswith("LOCUST_")},
            start_new_session=True,
        )
        try:
            if cores is not None:
                cores.apply(child.pid)
            _wait(child, time.monotonic() + plan.limit_s + _START_S, log, on_poll)
        finally:
            _end_group(child)
    if child.returncode != 0:
        raise DSparkError(
            f"the load generator failed with code {child.returncode}; {log} ends: {_tail(log)}"
        )
    return load_cell(directory)


def _wait(
    child: subprocess.Popen[bytes], deadline: float, log: Path, on_poll: Callable[[], None] | None
) -> None:
    """Wait until the child ends. Raises DSparkError if it does not end by the deadline."""
    while child.poll() is None:
        if time.monotonic() > deadline:
            raise DSparkError(f"the load generator does not end; see {log}")
        if on_poll is not None:
            on_poll()
        time.sleep(_POLL_S)


def load_cell(directory: Path) -> CellResult:
    """Load a cell that was measured before. Raises DSparkError if it is not complete."""
    plan = CellPlan.load(directory / PLAN_FILE)
    header, records = merge([read_records(path) for path in sorted(directory.glob(RECORDS))])
    if header.fingerprint != plan.schedule.fingerprint():
        raise DSparkError(f"the records in {directory} are not of its plan; measure it again")
    if len(records) != len(plan.schedule.arrivals):
        raise DSparkError(
            f"{directory} holds {len(records)} of {len(plan.schedule.arrivals)} records"
        )
    measurement = measure_cell(header, records, plan.schedule.users)
    return CellResult(header, tuple(records), measurement)


def _command(plan: CellPlan, url: str, directory: Path, processes: int) -> list[str]:
    users = str(plan.users)
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py"))]
    command += ["--headless", "--host", url, "--users", users, "--spawn-rate", users]
    command += ["--only-summary", "--exit-code-on-error", "0", "--loglevel", "WARNING"]
    command += ["--plan", str(directory / PLAN_FILE), "--records", str(directory)]
    if processes == 1:
        return command
    # Locust's own port, 5557 on every interface, would limit a machine to one cell at a time.
    port = str(free_port(HOST))
    command += ["--master-bind-host", HOST, "--master-bind-port", port]
    command += ["--master-host", HOST, "--master-port", port]
    return [*command, "--processes", str(processes)]


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child and its process group, unless the group has ended by itself."""
    for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-400:] or "nothing"
