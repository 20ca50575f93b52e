"""Fork servers from a process that has already imported torch and transformers.

    python -m tests.integration.preload FD

These imports are most of a server's start on a CPU, and the same for every server. SGLang and this
package are imported after the fork, in the environment of each server. FD: a socket; every message
is one JSON object, answered by one. `{"run": [...]}` comes with a log's file descriptor.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

import setproctitle

LIBRARIES = (
    "torch._inductor.compile_fx",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "fastapi",
    "uvicorn",
    "numba",
    "openai.types.responses",
    "xgrammar",
)
MESSAGE = 1 << 20  # bytes
_PR_SET_PDEATHSIG = 1


def serve(channel: socket.socket) -> dict[str, Any]:
    """Answer messages. Return in a forked child, with what it should run; the parent exits."""
    while True:
        data, files, _, _ = socket.recv_fds(channel, MESSAGE, 1)
        if not data:
            raise SystemExit(0)
        message = json.loads(data)
        if "poll" in message:
            channel.send(json.dumps(_poll(message["poll"])).encode())
        elif pid := os.fork():
            os.close(files[0])
            channel.send(json.dumps(pid).encode())
        else:
            channel.close()
            _become(message, files[0])
            return message


def _poll(pid: int) -> int | None:
    """Return the exit status of a child in `Popen.returncode`'s convention, None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(message: dict[str, Any], log: int) -> None:
    """Take the session, directory, environment and streams that a new process would have."""
    os.setsid()
    _die_with_the_parent()
    os.chdir(message["directory"])
    os.environ.clear()
    os.environ.update(message["environment"])
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    added = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[1:1] = added
    if any(os.path.isfile(os.path.join(each, "sitecustomize.py")) for each in added):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _die_with_the_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def main() -> None:
    _die_with_the_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its channel does
    setproctitle.getproctitle()  # it looks for the title's place by the environment of the start
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    module, *sys.argv[1:] = serve(socket.socket(fileno=int(sys.argv[1])))["run"]
    runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # as `python -m` does


if __name__ == "__main__":
    main()
