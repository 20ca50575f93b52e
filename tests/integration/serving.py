"""Servers for the integration tests: started once, paused while another is measured, always ended.

Two cores are enough for one server at a time: an idle SGLang scheduler polls, so every server but
the one in use is frozen (SIGSTOP) and wakes with its caches as they were.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from sglang_dspark.loadtest.client.client import FLUSH_S
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec
from sglang_dspark.paths import cache_root
from tests.integration.preloaded import PreloadedServer
from tests.ports import free_ports

HOST = "127.0.0.1"
START_TIMEOUT_S = 900.0  # 20-40 s on a quiet machine
REQUEST_TIMEOUT_S = 300.0
FAREWELL_S = 8.0  # from an exception in SGLang's scheduler to the end of its server, at most
GRACE_S = 10.0  # for processes that are ending
MOST_IN_MEMORY = 5  # servers of a process of tests; each takes 1 to 2 GB, if ROOM is left
ROOM = 6 << 30  # bytes that another server and what it works with should find
CPU_FLAGS = ("--device", "cpu", "--max-total-tokens", "16384")
DSPARK_FLAGS = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path")


@dataclass
class Served:
    """A running server and the ways the tests talk to it."""

    process: ServerProcess
    pool: ServerPool
    http: httpx.Client

    @property
    def log(self) -> str:
        return self.process.log_path.read_text(errors="replace")

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Any request, once this server is the one that runs; where it has ended, its log's end."""
        self.pool.use(self)
        try:
            return self.http.request(method, path, **options)
        except httpx.TransportError as error:
            time.sleep(FAREWELL_S)
            if not self.process.alive():
                error.add_note(f"{path}: the server ended:\n{self.process.log_tail(60)}")
            raise

    def generate(
        self, prompt: str | Sequence[int], max_new_tokens: int = 16, **fields: Any
    ) -> dict[str, Any]:
        """POST /generate, greedy unless `sampling_params` say otherwise; the answer's JSON."""
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
        sampling |= fields.pop("sampling_params", {})
        source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        answer = self.request(
            "POST", "/generate", json={**source, "sampling_params": sampling, **fields}
        )
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:500]}"
        return answer.json()

    def generate_all(
        self, prompts: Sequence[str | Sequence[int]], concurrency: int, **fields: Any
    ) -> list[dict[str, Any]]:
        """One request a prompt, `concurrency` at a time; answers in the prompts' order."""
        return self.each(lambda prompt: self.generate(prompt, **fields), prompts, concurrency)

    def each(
        self, ask: Callable[[Any], dict[str, Any]], items: Sequence[Any], concurrency: int
    ) -> list[dict[str, Any]]:
        """`ask` of every item, `concurrency` at a time; answers in the items' order."""
        self.pool.use(self)
        with ThreadPoolExecutor(concurrency) as threads:
            return list(threads.map(ask, items))

    def flush_cache(self) -> None:
        """Forget all cached prefixes, once no request is in work."""
        answer = self.request("POST", "/flush_cache", params={"timeout": FLUSH_S})
        assert answer.status_code == 200, answer.text

    def listens(self) -> set[tuple[str, int]]:
        """Addresses and ports at which any of the server's processes listens."""
        first = psutil.Process(self.process.pid)
        found = [c for p in [first, *first.children(recursive=True)] for c in p.net_connections()]
        return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}

    def healthy(self) -> bool:
        """Return whether the server runs and can generate."""
        self.pool.use(self)
        return self.process.alive() and self.request("GET", "/health_generate").status_code == 200


POOLS: list[ServerPool] = []  # of this process


@dataclass
class ServerPool:
    """All servers of a test session; one runs at a time, and few are kept in memory.

    servers: by name, the one used last at the end. put_away: names of those ended to make room;
    they start again when they are used. A machine that is short of memory keeps none but one.
    """

    folder: Path
    servers: dict[str, Served] = field(default_factory=dict)
    running: Served | None = None
    put_away: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        POOLS.append(self)

    def start(self, name: str, model: Path, *arguments: str, **environment: str) -> Served:
        """Start a server and wait until it answers; on failure the log's end is in the report."""
        self._pause()
        self._make_room()
        _share_machine_code(environment)
        spec = ServerSpec(
            name, model, free_ports(), (*CPU_FLAGS, *arguments), HOST, environment=environment
        )
        process = PreloadedServer(spec, self.folder)
        try:
            process.start().wait_ready(START_TIMEOUT_S)
        except BaseException:
            process.stop()
            print(f"--- end of {process.log_path}\n{process.log_tail(60)}")
            raise
        client = httpx.Client(
            base_url=spec.url,
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
            limits=httpx.Limits(keepalive_expiry=2.0),  # uvicorn closes what was idle for 5 s
        )
        served = Served(process, self, client)
        self.servers[name] = self.running = served
        return served

    def use(self, served: Served) -> None:
        """Let this server run, and no other."""
        if self.running is served:
            return
        self._pause()
        name = next(name for name, each in self.servers.items() if each is served)
        self.servers[name] = self.servers.pop(name)
        if name in self.put_away:
            self._make_room()
            served.process.start().wait_ready(START_TIMEOUT_S)
            self.put_away.remove(name)
        else:
            served.process.resume()
        self.running = served

    def _pause(self) -> None:
        """Freeze the server in use; those of other pools, whose tests have had their turn, end."""
        for other in POOLS:
            if other is not self:
                other.put_all_away()
        if self.running is not None:
            self.running.process.pause()
            self.running = None

    def _make_room(self) -> None:
        """End servers, those used longest ago first, so that one more can be in memory."""
        kept = [name for name in self.servers if name not in self.put_away]
        for place, name in enumerate(kept):
            enough = psutil.virtual_memory().available >= ROOM
            if enough and len(kept) - place < MOST_IN_MEMORY:
                break
            self.servers[name].process.stop()
            self.put_away.add(name)

    def put_all_away(self) -> None:
        """End all servers for now: a test with servers of its own needs the memory."""
        self.running = None
        for name in self.servers.keys() - self.put_away:
            self.servers[name].process.stop()
            self.put_away.add(name)

    def stop(self, name: str) -> None:
        """End one server and all its processes."""
        served = self.servers.pop(name)
        self.put_away.discard(name)
        if self.running is served:
            self.running = None
        served.http.close()
        served.process.stop()

    def stop_all(self) -> None:
        for name in list(self.servers):
            self.stop(name)


def _share_machine_code(environment: Mapping[str, str]) -> None:
    """A cache of its own is for step times; what Numba compiles is the same everywhere."""
    if own := environment.get("XDG_CACHE_HOME"):
        for name in ("kernels", "schedule"):
            shared, link = cache_root() / "sglang-dspark" / name, Path(own) / "sglang-dspark" / name
            shared.mkdir(parents=True, exist_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(shared)


@dataclass(frozen=True)
class Ended:
    """A command line that was expected to end by itself."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    leftovers: list[str]

    @property
    def ours(self) -> list[str]:
        """The lines that this package printed."""
        return [line for line in self.stderr.splitlines() if line.startswith("sglang-dspark:")]


def run_to_the_end(spec: ServerSpec, environment: dict[str, str], timeout_s: float) -> Ended:
    """Run a server's command line until it ends, and look for processes it left behind.

    A run that does not end is killed with its whole process group and fails the test.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        spec.command(),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end_group(process.pid)
        stdout, stderr = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{stderr[-3000:]}") from None
    seconds = time.monotonic() - began
    leftovers = _end_group(process.pid)
    return Ended(process.returncode, stdout, stderr, seconds, leftovers)


def _end_group(session: int) -> list[str]:
    """Kill what is left of a session; names of what did not end by itself.

    The command ends before the children it has killed are gone, and Python's resource tracker ends
    when it reads the end of its pipe: both get a while, which a process that stays outlives.
    """
    deadline = time.monotonic() + GRACE_S
    while (stayed := _of_session(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = []
    for process in stayed:
        try:
            left.append(f"{process.pid} {process.name()}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return left


def _of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return found
