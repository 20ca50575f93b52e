"""Set defaults of a CPU server's memory and processes; upstream's are for a GPU.

The KV pool gets a quarter of the memory that is free at the start. Upstream
(sglang/srt/mem_cache/kv_cache_configurator.py) takes nearly all of it, as on a GPU, which one
server owns: 15 of 24 GB for a model of 135M parameters, and the next server is killed.

Processes are forked from the first one, which has imported SGLang and torch. Upstream
(sglang/srt/entrypoints/engine.py, `_set_envs_and_config`) spawns them, as a process that has used
CUDA must. Each spawned process imports both again: 8 s of computing a process, and 550 MB a server.
A fork copies only the thread that calls it, and OpenMP hangs in a child whose parent has used it.
So a process that has other threads by then (an engine in a user's own program) still spawns.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import sys
from typing import Any

from threadpoolctl import threadpool_info

from sglang_dspark.backends.cpu import rank_resources, threads
from sglang_dspark.patches.seam import Seams

SEAMS = Seams(device="cpu")
logger = logging.getLogger(__name__)

SHARE = 0.25  # of the memory free at the start, for the pools of all ranks that share it


@SEAMS.after(
    "cpu-pool-default",
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
    why="upstream takes nearly all free memory of the machine for the KV pool",
)
def limit_pool(result: int, self: Any, pre_model_load_memory: float) -> int:
    """Return the bytes for the pools of a rank (AFTER hook of `_profile_available_bytes`).

    pre_model_load_memory: GiB free on the rank's memory node before its weights are loaded.
    """
    # The user's own arguments: upstream has filled in a fraction in the resolved ones.
    given = getattr(self.server_args, "_raw_input", None) or {}
    if any(given.get(name) is not None for name in ("max_total_tokens", "mem_fraction_static")):
        return result
    together = -(-int(os.environ.get(threads.RANKS, "1")) // rank_resources.memory_nodes())
    most = int(pre_model_load_memory * (1 << 30) * SHARE / together)
    if result <= most:
        return result
    logger.info(
        "sglang-dspark: KV pool limited to %.1f GiB, a quarter of the %.1f GiB free at the start; "
        "--max-total-tokens or --mem-fraction-static sets its size",
        most / (1 << 30),
        pre_model_load_memory,
    )
    return most


@SEAMS.after(
    "cpu-fork",
    "sglang.srt.entrypoints.engine._set_envs_and_config",
    why="upstream spawns: every process imports SGLang for 8 s, and keeps a copy of it",
)
def fork_if_safe(result: None, server_args: Any) -> None:
    """Start processes by `fork`, or log why not (AFTER hook of `_set_envs_and_config`)."""
    reason = why_not()
    if reason is None:
        mp.set_start_method("fork", force=True)
    else:
        logger.info("sglang-dspark: processes are spawned, which takes longer: %s", reason)


def why_not() -> str | None:
    """Return the reason why this process must not fork; None if it may."""
    if sys.platform != "linux":
        return f"forks are not safe on {sys.platform}"
    # OpenBLAS starts its threads when NumPy is imported, and again in a child.
    pools = [pool for pool in threadpool_info() if pool["internal_api"] == "openblas"]
    others = len(os.listdir("/proc/self/task")) - sum(pool["num_threads"] - 1 for pool in pools)
    return None if others <= 1 else f"this process has {others} threads already"
