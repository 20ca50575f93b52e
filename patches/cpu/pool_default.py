"""Limit the default KV pool on a CPU to a quarter of the memory that was free at the start.

Upstream (sglang/srt/mem_cache/kv_cache_configurator.py) sizes the pool as on a GPU, which
one server owns: nearly all free memory, 15 of 24 GB for a model of 135M parameters. Other programs
share a CPU's memory; the next server is killed. `--max-total-tokens` or `--mem-fraction-static`
sets the size as upstream does.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang_dspark.backends.cpu import rank_resources, threads
from sglang_dspark.patches.seam import Seams

SEAMS = Seams(device="cpu")
logger = logging.getLogger(__name__)

SHARE = 0.25  # of the memory free at the start, for the pools of all ranks that share it
SIZES = ("max_total_tokens", "mem_fraction_static")


@SEAMS.after(
    "cpu-pool-default",
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
    why="upstream takes nearly all free memory of the machine for the KV pool",
)
def limit_pool(result: int, self: Any, pre_model_load_memory: float) -> int:
    """AFTER hook of `_profile_available_bytes`: return the bytes for the pools of a rank.

    pre_model_load_memory: GiB free on the rank's memory node before its weights are loaded.
    """
    # The user's own arguments: in the resolved ones upstream has filled in a fraction.
    given = getattr(self.server_args, "_raw_input", None) or {}
    if any(given.get(name) is not None for name in SIZES):
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
