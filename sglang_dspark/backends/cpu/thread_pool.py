"""Threads that share a matrix product's rows and wait for the next one awake.

A decode step is a chain of some two hundred products of a few dozen microseconds. OpenMP's threads
either sleep between two of them, which costs more than they take over, or spin through whatever
else the machine has to do. Here (csrc/pool.cpp) a waiting thread spins for some tens of
microseconds, about as long as anything between two products takes, and then sleeps. Parts are taken
one at a time by any free thread, the caller too, which therefore waits for parts that were begun
and never for a thread.

Which thread computes a part changes nothing in it: results have the same bits. A process that was
forked has no threads; its caller takes all parts.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from dataclasses import dataclass, field
from functools import lru_cache

from sglang_dspark.backends.cpu.csrc import Library, library


@dataclass
class ThreadPool:
    """The process's pool. threads: those that take parts, a caller among them."""

    library: Library
    threads: int = 1
    _never: ctypes.c_int32 = field(default_factory=ctypes.c_int32)  # 0: threads serve to the end

    @property
    def entry(self) -> int:
        """Address of `run(work, data, length, threads)`, C integers."""
        return self.library.pool_run

    def grow(self, threads: int) -> None:
        """Have so many threads, the caller among them; never fewer than there are."""
        for number in range(self.threads, threads):
            threading.Thread(
                target=self.library.pool_serve,
                args=(ctypes.addressof(self._never),),
                name=f"products-{number}",
                daemon=True,
            ).start()
        self.threads = max(self.threads, threads)


def why_not() -> str | None:
    """Why there is no pool on this machine; None: there is."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"threads of products wait as Linux on x86-64 can, and this is {platform.platform()}"
    return None


def sharing(threads: int) -> tuple[int, int]:
    """What compiled code shares work out by (`jit.in_parts`): the pool's entry, and the threads
    that it has then. No more than one where there is no pool."""
    pool = process_pool() if threads > 1 else None
    if pool is None:
        return 0, 1
    pool.grow(threads)
    return pool.entry, threads


@lru_cache(maxsize=1)
def process_pool() -> ThreadPool | None:
    """The pool; None where there is a reason not to, or no library (csrc.py)."""
    loaded = library() if why_not() is None else None
    return None if loaded is None else ThreadPool(loaded)
