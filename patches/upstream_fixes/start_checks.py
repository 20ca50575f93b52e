"""Refuse a port in use, and a missing package, in one line before anything is loaded.

Upstream finds the port in use after the model has loaded, and raises the package's ImportError in a
scheduler (sglang/srt/utils/torch_memory_saver_adapter.py).
"""

from __future__ import annotations

import importlib.util
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.patches.seam import Seams
from sglang_dspark.ports import require_free_port
from sglang_dspark.serving import startup

SEAMS = Seams()


@SEAMS.after(
    "start-checks",
    "sglang.srt.server_args.prepare_server_args",
    why="upstream finds the port in use only after the model has loaded, and ends with a "
    "traceback from a scheduler when --enable-memory-saver has no package",
    issue="sgl-project/sglang#4985",
    drop_when="upstream refuses a port in use, and the flag without its package, before it loads "
    "the model or spawns a process",
)
def check_start(server_args: Any, argv: list[str]) -> None:
    """Stop a server that cannot start (AFTER hook of `prepare_server_args`).

    Both command lines (`sglang serve`, `python -m sglang.launch_server`) call that function, in the
    process that will listen. The offline engine listens on no port and does not call it.
    """
    if server_args.enable_memory_saver and not importlib.util.find_spec("torch_memory_saver"):
        startup.stop(
            "--enable-memory-saver needs the package torch-memory-saver (pip install "
            "torch-memory-saver), which moves a GPU's memory; leave the flag out on a CPU"
        )
    try:
        require_free_port(server_args.host or "127.0.0.1", int(server_args.port))
    except DSparkError as error:
        startup.stop(str(error))
