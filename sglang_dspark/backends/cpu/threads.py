"""Choose the number of compute threads, and run the pool that shares matrix products.

A decode step is a chain of about two hundred products of a few dozen microseconds. Between two of
them OpenMP threads either sleep, which costs more than they save, or spin through all other work of
the machine: a whole scheduler slice (about 15 ms) when another process wants the core. In our pool
(csrc/pool.cpp) a waiting thread spins for some tens of microseconds and then sleeps. Any free
thread, the caller included, computes the next part, with the same result, so the caller never waits
for a thread. A forked process has no threads; its caller computes all parts.

A second compute thread on two cores competes with the HTTP server and the detokenizer: 5 to 24%
faster on an idle machine, slower next to other work. So one core is left to the rest of the server.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from functools import lru_cache

from sglang_dspark.backends.cpu.csrc import library
from sglang_dspark.serving.config import current_config

RANKS = "_SGLANG_DSPARK_RANKS"  # of this server on this machine, read by its processes
_NEVER = ctypes.c_int32()  # 0: threads of the pool run to the end
_started: list[threading.Thread] = []  # the pool's threads besides the caller


def chosen_threads() -> int:
    """Return the user's choice (`cpu.threads`, then OMP_NUM_THREADS) or the default.

    The default is this process's cores but one, split among the ranks: at least one thread each.
    """
    configured = current_config().cpu.threads
    if configured is not None:
        return configured
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, (cores - 1) // int(os.environ.get(RANKS, "1")))


def pool_threads(threads: int) -> int:
    """Grow the pool to `threads` threads, the caller included, and return their number.

    Returns 1 without a pool.
    """
    pool = pool_library() if threads > 1 else None
    if pool is None:
        return 1
    while len(_started) + 1 < threads:
        name, never = f"products-{len(_started) + 1}", ctypes.addressof(_NEVER)
        serve = pool.dspark_pool_serve
        _started.append(threading.Thread(target=serve, args=(never,), name=name, daemon=True))
        _started[-1].start()
    return threads


@lru_cache(maxsize=1)
def pool_library() -> ctypes.CDLL | None:
    """Return the library with the pool; None unless the system is Linux on x86-64, for which
    csrc/pool.cpp waits."""
    waits = sys.platform == "linux" and platform.machine() == "x86_64"
    return library() if waits else None
