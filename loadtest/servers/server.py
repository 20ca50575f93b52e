"""Run one SGLang server as a child process: port check, health wait, log file, certain end.

The server gets its own session and process group, so that its scheduler and detokenizer processes
end with it, and so that Ctrl-C signals only this process, which then stops the group in order.
Servers still alive when the interpreter exits are stopped (`atexit`); `stop_on_signals` turns
SIGTERM and SIGHUP into a normal exit. If this process is killed, on Linux the kernel kills the
server, and SGLang then its own processes.
"""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO

import httpx

from sglang_dspark.errors import DSparkError
from sglang_dspark.extras import require_sglang
from sglang_dspark.ports import require_free_port

_POLL_S = 0.25
_TERM_GRACE_S = 2.0  # SGLang polls for SIGTERM every 5 s, too long to wait
_KILL_GRACE_S = 3.0
# 1: PR_SET_PDEATHSIG, which an exec keeps
_TIE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, ctypes.c_ulong(9)); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_live: set[ServerProcess] = set()


@dataclass(frozen=True)
class ServerSpec:
    """The launch of a server: `arguments` go to `python -m <module>` after model, host and port."""

    name: str
    model: Path
    port: int
    arguments: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "sglang.launch_server"

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise DSparkError(f"port {self.port} of server {self.name} is not in 1..65535")

    @property
    def url(self) -> str:
        """Return the base address, without a slash at the end."""
        return f"http://{self.host}:{self.port}"

    def launched_by(self, module: str) -> ServerSpec:
        """Return the same server, started by another module."""
        return replace(self, module=module)

    def command(self) -> list[str]:
        """Return the argument vector, with this interpreter."""
        head = [sys.executable, "-m", self.module, "--model-path", str(self.model)]
        return [*head, "--host", self.host, "--port", str(self.port), *self.arguments]

    def shell_line(self) -> str:
        """Return the command with its variables, as a line to copy into a shell."""
        variables = [f"{k}={shlex.quote(v)}" for k, v in self.environment.items()]
        return " ".join([*variables, shlex.join(["python", *self.command()[1:]])])


class ServerProcess:
    """A running server; use it as a context manager, or call `stop`."""

    def __init__(self, spec: ServerSpec, run_dir: Path, cores: Collection[int] = ()):
        """Prepare a server, not yet started.

        run_dir: directory of `<name>.log` (created if missing). cores: those that the server may
        use; empty: all of this process.
        """
        self.spec = spec
        self._cores = cores
        self.log_path = run_dir / f"{spec.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.ready_after: float | None = None  # seconds that `wait_ready` took

    def start(self) -> ServerProcess:
        """Launch without waiting. Raises DSparkError without SGLang, or if the port is used."""
        require_sglang()
        require_free_port(self.spec.host, self.spec.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        _live.add(self)  # first, so that a signal from here on finds it
        with self.log_path.open("wb") as log:
            self._process = self._launch(log)
        if self._cores:  # before it starts threads, which all inherit it
            os.sched_setaffinity(self._process.pid, self._cores)
        return self

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            tied(self.spec.command()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.spec.environment},
            start_new_session=True,
        )

    def wait_ready(self, timeout_s: float, tick: Callable[[float], None] | None = None) -> float:
        """Wait until `/health` answers 200; return the seconds waited.

        tick: called several times a second with the seconds waited so far.
        Raises DSparkError if the server ends first or is not ready in time; it is then stopped,
        and the log's last lines are in `log_tail()`.
        """
        began = time.monotonic()
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while (waited := time.monotonic() - began) < timeout_s:
                status = self._popen.poll()
                if status is not None:
                    self.stop()
                    raise DSparkError(
                        f"the {self.spec.name} server ended with status {status} before it was "
                        f"ready: {self._last_complaint()} (log: {self.log_path})"
                    )
                try:
                    if client.get(f"{self.spec.url}/health").status_code == 200:
                        self.ready_after = waited
                        return waited
                except httpx.TransportError:
                    pass  # not listening yet
                if tick is not None:
                    tick(waited)
                time.sleep(_POLL_S)
        self.stop()
        raise DSparkError(
            f"the {self.spec.name} server was not ready after {timeout_s:.0f} s: "
            f"{self._last_complaint()} (log: {self.log_path})"
        )

    @property
    def pid(self) -> int:
        """Return the process id of the server's first process, which is also its process group."""
        return self._popen.pid

    def alive(self) -> bool:
        """Return whether the server's first process runs."""
        return self._process is not None and self._process.poll() is None

    def pause(self) -> None:
        """Freeze all of the server's processes: it keeps its memory and uses no CPU time."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume a paused server."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the whole process group, by SIGTERM and then SIGKILL; safe to call twice.

        SIGKILL is sent to the first process alone at first: SGLang's other processes die with it,
        and Python's resource tracker then removes their semaphores.
        """
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        self._wait_for_group(_TERM_GRACE_S)
        if self._process.poll() is None:
            self._process.kill()
        self._wait_for_group(_KILL_GRACE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        _live.discard(self)

    def log_tail(self, lines: int = 20) -> str:
        """Return the log's last lines."""
        if not self.log_path.is_file():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _popen(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise DSparkError(f"the {self.spec.name} server has not been started")
        return self._process

    def _wait_for_group(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while _group_alive(self.pid, self._popen) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # the group has ended

    def _last_complaint(self) -> str:
        lines = [line.strip() for line in self.log_tail(200).splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("sglang-dspark:")]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return (ours or errors or lines or ["it wrote no log"])[-1]


def tied(command: Sequence[str]) -> list[str]:
    """Wrap a command so that the kernel kills its process when this one ends, even if killed.

    A Python of a few milliseconds requests that and execs the command: `Popen(preexec_fn=...)`
    could lose a Ctrl-C in the fork. On other systems than Linux the command is unchanged.
    """
    return [sys.executable, "-S", "-c", _TIE, *command] if sys.platform == "linux" else [*command]


def run_directory(root: Path = Path("runs")) -> Path:
    """Create a new directory for the logs of one run, named by the time."""
    path = root / time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        candidate = path.with_name(path.name + suffix)
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise DSparkError(f"cannot write logs under {root.resolve()}: {error}") from error
        return candidate
    raise DSparkError(f"too many runs named {path} in one second")


@contextmanager
def stop_on_signals(numbers: Sequence[int] = (signal.SIGTERM, signal.SIGHUP)) -> Iterator[None]:
    """Turn the signals into SystemExit(128 + n), so that `with` blocks and atexit stop servers.

    Signals that are ignored already stay so: nohup ignores SIGHUP so that the work continues.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _group_alive(group: int, leader: subprocess.Popen[bytes]) -> bool:
    leader.poll()  # reap it: a zombie would keep the group alive
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@atexit.register
def _stop_all() -> None:
    for server in list(_live):
        server.stop()
