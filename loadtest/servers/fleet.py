"""The servers of a sweep: started on demand, frozen while another one is measured, stopped.

An idle SGLang scheduler still polls, which slows the measured arm on a small machine. A frozen one
(SIGSTOP) uses no CPU time and keeps its memory. Servers given by URL are never started or frozen.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.servers.arms import Arm
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec

LOGS = "logs"
Tick = Callable[[str, float], None]


@dataclass(frozen=True)
class Place:
    """The server of one arm: launched from `spec`, or running at `url` already."""

    arm: Arm
    url: str
    spec: ServerSpec | None


class Fleet:
    """All servers of a sweep. A context manager: it stops every server that it started."""

    def __init__(
        self, places: Sequence[Place], run: Path, ready_s: float, cores: Sequence[int] = ()
    ):
        """Prepare the servers of `places`, none of them started.

        run: the sweep's folder, for the logs; ready_s: longest wait for a server's health;
        cores: those that servers may use, empty for all.
        """
        self.places = {place.arm.name: place for place in places}
        self._logs, self._ready_s, self._cores = run / LOGS, ready_s, cores
        self._running: dict[str, ServerProcess] = {}
        self._ready: set[str] = set()
        self.ready_after: dict[str, float] = {}
        self.starts: dict[str, int] = {}  # how often each has been started

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        with ThreadPoolExecutor() as pool:  # each of them takes seconds to end
            list(pool.map(self.stop, list(self._running)))

    def ensure(self, names: Sequence[str], tick: Tick) -> None:
        """Start those of these arms' servers that do not run, in parallel, and freeze them.

        tick: called with an arm's name and the seconds waited. Raises DSparkError if one does not
        start, naming its log, or if no server answers at an arm's URL.
        """
        for name in names:
            if not self.alive(name):
                self._launch(name)
        for name in names:
            server = self._running.get(name)
            if server is None or name in self._ready:
                continue
            self.ready_after[name] = server.wait_ready(self._ready_s, partial(tick, name))
            self.starts[name] = self.starts.get(name, 0) + 1
            self._ready.add(name)
            server.pause()

    def _launch(self, name: str) -> None:
        place = self.places[name]
        if place.spec is None:
            raise DSparkError(f"arm {name}: no healthy server answers at {place.url}/health")
        self.stop(name)  # the remains of one that died
        end_writers(self.log_path(name))
        self._keep_log(name)
        self._running[name] = ServerProcess(place.spec, self._logs, self._cores)
        self._running[name].start()

    def adopt(self, name: str, server: ServerProcess) -> None:
        """Adopt an arm's ready server that was started elsewhere: freeze it, stop it at the end."""
        self._running[name] = server
        self._ready.add(name)
        self.starts[name] = self.starts.get(name, 0) + 1
        if server.ready_after is not None:
            self.ready_after[name] = server.ready_after
        server.pause()

    def alive(self, name: str) -> bool:
        """Return whether the server's first process runs; of an arm by URL, whether it answers."""
        if name in self._running:
            return self._running[name].alive()
        return self.places[name].spec is None and _answers(self.places[name].url)

    @contextmanager
    def awake(self, name: str) -> Iterator[str]:
        """Run the arm's server within the block, and yield its address."""
        server = self._running.get(name)
        if server is not None:
            server.resume()
        try:
            yield self.places[name].url
        finally:
            if server is not None:
                server.pause()

    def stop(self, name: str) -> None:
        """Stop the arm's server, if this fleet runs it."""
        server = self._running.pop(name, None)
        self._ready.discard(name)
        if server is not None:
            server.stop()

    def stop_others(self, name: str) -> None:
        """Stop every server of this fleet but this arm's."""
        for other in [each for each in self._running if each != name]:
            self.stop(other)

    def log_tail(self, name: str) -> str:
        """Return the last lines of an arm's log, "" for an arm by URL."""
        server = self._running.get(name)
        return "" if server is None else server.log_tail()

    def log_path(self, name: str) -> Path:
        """Return the log of a server that the sweep starts; an arm by URL has none."""
        return self._logs / f"{name}.log"

    def log_hint(self, name: str) -> str:
        """Return the end of an error message, which names the log of the arm's server."""
        place = self.places[name]
        if place.spec is None:
            return f"see the log of the server at {place.url}"
        return f"see {self.log_path(name)}"

    def _keep_log(self, name: str) -> None:
        """Rename the old log of a restarted server, which shows why the server died."""
        log = self.log_path(name)
        if log.exists():
            number = len(list(self._logs.glob(f"{name}.log.*"))) + 1
            log.replace(log.with_name(f"{log.name}.{number}"))


def end_writers(log: Path) -> None:
    """Kill the processes whose output goes to this log.

    If a sweep is killed while a server starts, SGLang's own processes are not yet tied to their
    parent and survive; the resumed sweep in the same folder kills them. Without /proc, no effect.
    """
    wanted = str(log.absolute())
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if os.readlink(output) == wanted:
                os.kill(int(output.parts[2]), signal.SIGKILL)
        except OSError:
            continue  # it has ended meanwhile, or is another user's


def _answers(url: str) -> bool:
    try:
        status = httpx.get(f"{url}/health", trust_env=False, timeout=5.0).status_code
    except httpx.TransportError:
        return False
    return status in (200, 404)  # other vendors' servers may have no such page
