"""Lock a file, so that only one of a user's processes on this machine runs a block at a time.

The kernel releases the lock when its holder ends for any reason, so no stale lock remains.
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
    """Hold an exclusive lock on the file `path` while the block runs.

    path: an empty file; it and its parent directories are created. waits: called once if another
    process holds the lock. Raises OSError if the file cannot be opened or locked, TimeoutError if
    the other process holds the lock for longer than patience_s.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:  # closing the file releases the lock
        _lock(file.fileno(), time.monotonic() + patience_s, waits)
        yield


def _lock(file: int, deadline: float, waits: Callable[[], None]) -> None:
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # another process holds the lock
            if time.monotonic() >= deadline:
                raise TimeoutError("another process takes its turn and does not end") from None
        if not told:
            waits()
            told = True
        time.sleep(_POLL_S)
