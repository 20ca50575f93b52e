"""Gives the holes of a model process's heap back to the system, twice a minute.

A step's tensors come and go in unlike sizes between small ones that stay, and glibc keeps the
holes: memory in use stands still while the resident set grows for hours. A lower threshold for
mappings of their own stops that too, but every step pays for new pages then (dev/LOG.md).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

EVERY_S = 30.0  # one call takes a few milliseconds, and the next steps touch what they need again
THREAD = "dspark-heap"


def keep_small() -> None:
    """Begin in this process; repeatable. Nothing happens where the C library has no such call."""
    trim = _trim()
    if trim is not None and all(thread.name != THREAD for thread in threading.enumerate()):
        threading.Thread(target=_repeat, args=(trim,), name=THREAD, daemon=True).start()


def _trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None with another C library. A call of it does not hold the GIL."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def _repeat(trim: Callable[[int], int]) -> None:
    pause = threading.Event()
    while not pause.wait(EVERY_S):
        trim(0)
