"""Limits the default KV pool on a CPU.

The hook: `sglang_dspark/backends/cpu/pool_default.py`.
"""

from __future__ import annotations

from sglang_dspark.backends.cpu import pool_default
from sglang_dspark.patches.seam import Seam

SEAMS = (
    Seam(
        name="cpu-pool-default",
        target=(
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
            "._profile_available_bytes"
        ),
        kind="after",
        hook=pool_default.limit_pool,
        signature="(self, pre_model_load_memory)",
        why="upstream takes nearly all free memory of the machine for the KV pool",
        device="cpu",
    ),
)
