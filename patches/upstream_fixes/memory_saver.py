"""Refuse --enable-memory-saver without its package in one line, before anything is loaded.

Upstream: sglang/srt/utils/torch_memory_saver_adapter.py raises the ImportError in a
scheduler. As `port_check`, it hooks the function that both command lines call.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import startup


def check_memory_saver(server_args: Any, argv: list[str]) -> None:
    """AFTER hook of `prepare_server_args`: stop the server if the package is missing."""
    if server_args.enable_memory_saver and not importlib.util.find_spec("torch_memory_saver"):
        startup.stop(
            "--enable-memory-saver needs the package torch-memory-saver (pip install "
            "torch-memory-saver), which moves a GPU's memory; leave the flag out on a CPU"
        )


SEAMS = (
    Seam(
        name="memory-saver",
        target="sglang.srt.server_args.prepare_server_args",
        kind="after",
        hook=check_memory_saver,
        signature="(argv)",
        why="upstream ends with a traceback from a scheduler when the package is missing",
        issue="sgl-project/sglang#4985",
        drop_when="upstream refuses the flag without its package before it spawns a process",
    ),
)
