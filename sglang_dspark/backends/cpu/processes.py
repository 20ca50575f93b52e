"""How the processes of a CPU server begin: forked from the first, which has imported everything.

SGLang spawns them, as a process that has used CUDA must, and each imports SGLang and torch again:
8 s of computing a process, and 550 MB a server. A fork copies only the thread that calls it, and
OpenMP hangs in a child whose parent had computed with it. So whoever has other threads by then (an
engine in a user's own program) spawns as before. OpenBLAS, which begins its threads when NumPy is
imported, starts them again in a child.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import sys

from threadpoolctl import threadpool_info

logger = logging.getLogger(__name__)


def fork_if_safe() -> None:
    """Make `fork` the way in which this process starts others, or say in the log why not."""
    reason = why_not()
    if reason is None:
        mp.set_start_method("fork", force=True)
    else:
        logger.info("sglang-dspark: processes are spawned, which takes longer: %s", reason)


def why_not() -> str | None:
    """Why this process must not fork; None where it may."""
    if sys.platform != "linux":
        return f"forks are not safe on {sys.platform}"
    pools = [pool for pool in threadpool_info() if pool["internal_api"] == "openblas"]
    others = _threads() - sum(pool["num_threads"] - 1 for pool in pools)
    return None if others <= 1 else f"this process has {others} threads already"


def _threads() -> int:
    """Threads of this process, native ones too."""
    return len(os.listdir("/proc/self/task"))
