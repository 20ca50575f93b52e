"""Two machines made of this one: network namespaces, joined by a cable of their own.

Nothing of theirs reaches a real network. Needs root and iproute2; `lacking` says what is missing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from sglang_dspark.loadtest.servers.server import tied

ADDRESSES = ("10.213.0.1", "10.213.0.2")  # as docs/parallel.md has them
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_OWN_MEMORY = 'mount -t tmpfs shm /dev/shm && exec "$@"'  # of this command: ip unshares mounts
_numbers = itertools.count()
T = TypeVar("T")


@cache
def lacking() -> str | None:
    """Why there can be no namespaces here; None: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("ss") is None:
        return "needs ip and ss (Debian: iproute2)"
    name = f"dspark-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@dataclass(frozen=True)
class Machine:
    """A namespace, its address on the cable, and its end of the cable."""

    name: str
    address: str
    cable: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs the words on this machine, with its own shared memory.

        SGLang checks shared memory to decide whether two processes are on one machine.
        """
        ip = shutil.which("ip")
        assert ip is not None
        return [ip, "netns", "exec", self.name, "sh", "-c", _OWN_MEMORY, "sh", *words]

    def start(
        self, words: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command of this machine in a session of its own; it ends with us."""
        with log.open("wb") as output:
            return subprocess.Popen(
                tied(self.command(words)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def call(self, function: Callable[[], T]) -> T:
        """Call the function in a thread of this process whose network is this machine's."""
        with ThreadPoolExecutor(1, initializer=self._enter) as thread:
            return thread.submit(function).result()

    def listens(self) -> set[str]:
        """`ADDRESS:PORT` of every TCP listener of this machine."""
        found = _run(*self.command(["ss", "-Hltn"]))
        return {line.split()[3] for line in found.splitlines()}

    def processes(self) -> list[int]:
        """Numbers of the processes that run on this machine."""
        return [int(word) for word in _run("ip", "netns", "pids", self.name).split()]

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}") as namespace:
            if libc.setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Both of them, with a cable from 10.213.0.1 to 10.213.0.2; what runs there ends with them."""
    number = f"{os.getpid()}-{next(_numbers)}"  # a test may have two machines beside others' two
    pair = tuple(
        Machine(f"dspark-{end}-{number}", address, f"ds{end}-{number}")
        for end, address in zip("ab", ADDRESSES, strict=True)
    )
    first, second = pair
    try:
        for machine in pair:
            _run("ip", "netns", "add", machine.name)
        peer = ("peer", "name", second.cable, "netns", second.name)
        _run("ip", "-n", first.name, "link", "add", first.cable, "type", "veth", *peer)
        for machine in pair:
            inside = ("ip", "-n", machine.name)
            _run(*inside, "addr", "add", f"{machine.address}/30", "dev", machine.cable)
            _run(*inside, "link", "set", machine.cable, "up")
            _run(*inside, "link", "set", "lo", "up")
        yield first, second
    finally:
        for machine in pair:
            _remove(machine)


def _remove(machine: Machine) -> None:
    if not Path(f"/run/netns/{machine.name}").exists():
        return
    for number in machine.processes():
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue
    _run("ip", "netns", "del", machine.name)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout
