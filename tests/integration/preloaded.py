"""Start a server by `preload.py`: the same command line, seconds sooner."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from typing import IO, Any

from sglang_dspark.loadtest.servers.server import ServerProcess
from tests.integration.preload import MESSAGE

# Read when torch, Triton, Numba or OpenMP are imported, which is before the fork.
_READ_EARLY = ("TORCH", "TRITON", "NUMBA", "OMP", "MKL", "KMP", "OPENBLAS", "CUDA", "LD_", "PYTHON")
_SAFE = ("PYTHONPATH",)
_CHANNEL = threading.RLock()  # a test's clients poll from threads of their own


class PreloadedServer(ServerProcess):
    """A server forked from this process's preload; by a new interpreter where that would differ."""

    def _launch(self, log: IO[bytes]) -> Any:
        changed = self.spec.environment.keys() - set(_SAFE)
        if any(name.startswith(_READ_EARLY) for name in changed):
            return super()._launch(log)
        return _Child(self.spec.command()[2:], {**os.environ, **self.spec.environment}, log)


class _Child:
    """The part of `subprocess.Popen` that `ServerProcess` uses, of a child of the preload."""

    def __init__(self, run: list[str], environment: dict[str, str], log: IO[bytes]):
        order = {"run": run, "environment": environment, "directory": os.getcwd()}
        self.args = run
        self.returncode: int | None = None
        self.pid: int = _ask(order, log.fileno())

    def poll(self) -> int | None:
        with _CHANNEL:  # a child's status can be asked for once
            if self.returncode is None:
                self.returncode = _ask({"poll": self.pid})
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.02)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _ask(message: dict[str, Any], *files: int) -> Any:
    with _CHANNEL:
        channel = _preload()
        socket.send_fds(channel, [json.dumps(message).encode()], files)
        return json.loads(channel.recv(MESSAGE))


@cache
def _preload() -> socket.socket:
    """Start the preload of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.integration.preload", str(theirs.fileno())]
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={**os.environ}
        )
    atexit.register(started.wait)
    atexit.register(ours.close)
    return ours
