"""One process at a time, among all of a user's on this machine: a lock on a file.

The kernel gives the lock back when its holder ends, however it ends, so none is left behind.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1


@contextmanager
def turn(path: Path, patience_s: float, waits: Callable[[], None]) -> Iterator[None]:
    """Within, no other process is in a block of the same `path`.

    path: a file of no content; it and folders above it are made. waits: called once where another
    process is there first. Raises OSError where the file cannot be had or locked, TimeoutError
    when the other process takes longer than patience_s.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:  # closing it gives the lock back
        _lock(file.fileno(), time.monotonic() + patience_s, waits)
        yield


def _lock(file: int, deadline: float, waits: Callable[[], None]) -> None:
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # another process has it
            if time.monotonic() >= deadline:
                raise TimeoutError("another process takes its turn and does not end") from None
        if not told:
            waits()
            told = True
        time.sleep(_POLL_S)
