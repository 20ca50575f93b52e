"""Adds `--dspark-config FILE` to the server's command line.

The hooks: `sglang_dspark/serving/config_flag.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import config_flag

SEAMS = (
    Seam(
        name="config-flag",
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        kind="after",
        hook=config_flag.add_config_flag,
        signature="(parser)",
        why="upstream's command line has no place for a plugin's own settings",
    ),
)
