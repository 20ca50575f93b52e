"""Choose the number of compute threads, and run the pool that shares matrix products.

A decode step is a chain of about two hundred products of a few dozen microseconds. OpenMP threads
either sleep between two products, which costs more than they save, or spin through all other
work of the machine: a whole scheduler slice (about 15 ms) per region when another process wants
the core. In our pool (csrc/pool.cpp) a waiting thread spins for some tens of microseconds, about as
long as the work between two products, and then sleeps. Any free thread, the caller included,
computes the next part, so the caller waits for parts in progress and never for a thread. A part's
result does not depend on the thread. A forked process has no threads; its caller computes all
parts.

A second compute thread on two cores competes with the HTTP server and the detokenizer: 5 to 24%
faster on an idle machine, slower next to other work. So the default leaves one core to the rest of
the server and lets idle threads sleep. Ranks of one server share the other cores.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from dataclasses import dataclass, field
from functools import lru_cache

from sglang_dspark.backends.cpu.csrc import library

RANKS = "_SGLANG_DSPARK_RANKS"  # of this server on this machine, read by its processes


def chosen_threads() -> int:
    """Return the user's choice (`cpu.threads`, then OMP_NUM_THREADS) or the default.

    The default is this process's cores but one, split among the ranks: at least one thread each.
    """
    from sglang_dspark.serving.config import current_config

    configured = current_config().cpu.threads
    if configured is not None:
        return configured
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, (cores - 1) // int(os.environ.get(RANKS, "1")))


@dataclass
class ThreadPool:
    """The process's pool. threads: those that compute parts, a caller included."""

    library: ctypes.CDLL
    threads: int = 1
    _never: ctypes.c_int32 = field(default_factory=ctypes.c_int32)  # 0: threads run to the end

    def grow(self, threads: int) -> None:
        """Grow to `threads` threads, the caller included; never shrink."""
        for number in range(self.threads, threads):
            threading.Thread(
                target=self.library.dspark_pool_serve,
                args=(ctypes.addressof(self._never),),
                name=f"products-{number}",
                daemon=True,
            ).start()
        self.threads = max(self.threads, threads)


def pool_threads(threads: int) -> int:
    """Grow the pool to `threads` threads and return their number; 1 without a pool."""
    pool = process_pool() if threads > 1 else None
    if pool is None:
        return 1
    pool.grow(threads)
    return threads


@lru_cache(maxsize=1)
def process_pool() -> ThreadPool | None:
    """Return the pool; None without the library, or if the system is not Linux on x86-64, for
    which csrc/pool.cpp waits."""
    waits = sys.platform == "linux" and platform.machine() == "x86_64"
    loaded = library() if waits else None
    return None if loaded is None else ThreadPool(loaded)
