"""Fork the processes of a CPU server from the first one, which has imported SGLang and torch.

Upstream (sglang/srt/entrypoints/engine.py, `_set_envs_and_config`) spawns them, as a process that
has used CUDA must. Each spawned process imports SGLang and torch again: 8 s of computing a process,
and 550 MB a server. A fork copies only the thread that calls it, and OpenMP hangs in a child whose
parent had computed with it. So a process that has other threads by then (an engine in a user's own
program) still spawns. OpenBLAS starts its threads when NumPy is imported, and starts them again in
a child.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import sys
from typing import Any

from threadpoolctl import threadpool_info

from sglang_dspark.patches.seam import Seams

SEAMS = Seams(device="cpu")
logger = logging.getLogger(__name__)


@SEAMS.after(
    "cpu-fork",
    "sglang.srt.entrypoints.engine._set_envs_and_config",
    why="upstream spawns: every process imports SGLang for 8 s, and keeps a copy of it",
)
def fork_if_safe(result: None, server_args: Any) -> None:
    """AFTER hook of `_set_envs_and_config`: start processes by `fork`, or log why not."""
    reason = why_not()
    if reason is None:
        mp.set_start_method("fork", force=True)
    else:
        logger.info("sglang-dspark: processes are spawned, which takes longer: %s", reason)


def why_not() -> str | None:
    """Return why this process must not fork; None if it may."""
    if sys.platform != "linux":
        return f"forks are not safe on {sys.platform}"
    pools = [pool for pool in threadpool_info() if pool["internal_api"] == "openblas"]
    others = _threads() - sum(pool["num_threads"] - 1 for pool in pools)
    return None if others <= 1 else f"this process has {others} threads already"


def _threads() -> int:
    """Count the threads of this process, native ones too."""
    return len(os.listdir("/proc/self/task"))
