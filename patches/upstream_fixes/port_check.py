"""Refuse a port in use at once, in one line, instead of after the model has loaded.

Upstream: sglang/srt/server_args.py, `prepare_server_args`: the one function that both
command lines (`sglang serve`, `python -m sglang.launch_server`) call, in the process that will
listen, before anything is spawned. The offline engine listens on no port and does not call it.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.patches.seam import Seam
from sglang_dspark.ports import require_free_port
from sglang_dspark.serving import startup


def check_port(server_args: Any, argv: list[str]) -> None:
    """AFTER hook of `prepare_server_args`: stop the server if the port is in use."""
    try:
        require_free_port(server_args.host or "127.0.0.1", int(server_args.port))
    except DSparkError as error:
        startup.stop(str(error))


SEAMS = (
    Seam(
        name="port-check",
        target="sglang.srt.server_args.prepare_server_args",
        kind="after",
        hook=check_port,
        signature="(argv)",
        why="upstream finds the port in use only after the model has loaded",
        issue="none found (2026-11-27)",
        drop_when="upstream refuses a port in use before it loads the model",
    ),
)
