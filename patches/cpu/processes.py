"""A CPU server's processes are forked: SGLang and torch are imported once, not three times.

Upstream (sglang/srt/entrypoints/engine.py, `_set_envs_and_config`) spawns them, as who
has used CUDA must.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.backends.cpu import processes
from sglang_dspark.patches.seam import Seam


def fork(result: None, server_args: Any) -> None:
    """AFTER hook of `_set_envs_and_config`."""
    processes.fork_if_safe()


SEAMS = (
    Seam(
        name="cpu-fork",
        target="sglang.srt.entrypoints.engine._set_envs_and_config",
        kind="after",
        hook=fork,
        signature="(server_args)",
        why="upstream spawns: every process imports SGLang for 8 s, and keeps a copy of it",
        device="cpu",
    ),
)
