"""One server over two machines, which are network namespaces of this one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.integration import tiny_models
from tests.integration.serving import REQUEST_TIMEOUT_S, START_TIMEOUT_S, Served
from tests.parallel.counters import counted
from tests.parallel.documented import documented
from tests.parallel.machines import ADDRESSES, Machine, lacking, two_machines
from tests.rehearsal.conftest import SLOTS
from tests.rehearsal.test_graphs import GREEDY_SAMPLING, PROMPTS, answers

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.xdist_group("parallel"),
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
]

PORT, MEETING = 30000, 20000


@dataclass
class Nodes:
    """A server of two machines; users are on the first."""

    machines: tuple[Machine, Machine]
    processes: Sequence[subprocess.Popen[bytes]]
    logs: Sequence[Path]

    def log(self, node: int) -> str:
        return self.logs[node].read_text(errors="replace")

    def ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        """One request over the first machine's loopback."""
        return self.machines[0].call(partial(_ask, method, path, body))

    def answers(self, users: int) -> list[list[int]]:
        """Greedy answers to the rehearsal's prompts, so many at a time."""

        def ask_all() -> list[list[int]]:
            with ThreadPoolExecutor(users) as threads:  # they are on the machine of their maker
                return list(threads.map(_generate, PROMPTS))

        return self.machines[0].call(ask_all)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            ended = [each.returncode for each in self.processes if each.poll() is not None]
            assert not ended, self.log(0)[-4000:] + self.log(1)[-4000:]
            try:
                if self.ask("GET", "/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.5)
        raise AssertionError(f"not ready after {START_TIMEOUT_S} s:\n{self.log(0)[-4000:]}")


def _ask(method: str, path: str, body: object) -> httpx.Response:
    url = f"http://127.0.0.1:{PORT}{path}"
    with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        return client.request(method, url, json=body)


def _generate(prompt: Sequence[int]) -> list[int]:
    sampling = {"temperature": 0.0, **GREEDY_SAMPLING}
    answer = _ask("POST", "/generate", {"input_ids": prompt, "sampling_params": sampling})
    assert answer.status_code == 200, answer.text[:500]
    found: list[int] = answer.json()["output_ids"]
    return found


def start(
    machines: tuple[Machine, Machine], pair: tiny_models.TinyPair, config: Path, folder: Path
) -> Nodes:
    """Both nodes by the page's commands; beside them only what a test needs: these two machines
    have one memory, and each would take most of it."""
    more = [
        "--max-total-tokens",
        "16384",
        "--dspark-config",
        str(config),
        "--max-running-requests",
        SLOTS,
        "--enable-metrics",
    ]
    environment = {"XDG_CACHE_HOME": str(folder / "cache")}
    logs = [folder / f"node-{node}.log" for node in range(2)]
    processes = []
    for node, machine in enumerate(machines):
        words = documented(f"node-{node}", TARGET=str(pair.target), DRAFTER=str(pair.drafter))
        assert f"{ADDRESSES[0]}:{MEETING}" in words
        processes.append(machine.start([*words, *more], logs[node], environment))
    nodes, began = Nodes(machines, processes, logs), time.monotonic()
    nodes.wait_ready()
    print(f"two machines ready after {time.monotonic() - began:.0f} s")
    return nodes


@pytest.fixture(scope="module")
def nodes(
    plain: Served,
    pair: tiny_models.TinyPair,
    by_confidence: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Nodes]:
    with two_machines() as machines:
        yield start(machines, pair, by_confidence, tmp_path_factory.mktemp("nodes"))


@pytest.mark.parametrize("users", [1, 4, 8])
def test_they_answer_as_one_plain_rank(plain: Served, nodes: Nodes, users: int) -> None:
    expected = answers(plain, users)
    assert nodes.answers(users) == expected


def test_the_first_node_decides(nodes: Nodes) -> None:
    nodes.answers(4)
    assert "TP0] sglang-dspark: mode compact, scheduled by" in nodes.log(0)
    assert "TP1] sglang-dspark: acts on the plans of rank 0" in nodes.log(1)
    (only,) = counted(nodes.ask("GET", "/metrics").text).values()
    assert only.cut_by_confidence(tiny_models.GAMMA)


def test_the_cable_has_the_meeting_point_and_gloo(nodes: Nodes) -> None:
    """Users are served on loopback; nothing listens at every address."""
    for node, machine in enumerate(nodes.machines):
        found = machine.listens()
        assert f"127.0.0.1:{PORT}" in found
        places = {place.rpartition(":")[0] for place in found}
        assert places == {"127.0.0.1", machine.address}
        on_cable = {place for place in found if place.startswith(machine.address)}
        assert (f"{machine.address}:{MEETING}" in on_cable) == (node == 0)
