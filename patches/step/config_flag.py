"""Add `--dspark-config FILE` to the server's command line.

Upstream: sglang/srt/server_args.py, `ServerArgs.add_cli_args`. Plugins are loaded before
the command line is parsed, and `ServerArgs.from_cli_args` reads only its own fields from the
namespace, so one more option is safe. Parsing it names the file in `SGLANG_DSPARK_CONFIG`, which
the spawned processes inherit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_dspark.errors import DSparkError
from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import startup
from sglang_dspark.serving.config import CONFIG_VARIABLE, use_config_file

SEAMS = Seams()


@SEAMS.after(
    "config-flag",
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    why="upstream's command line has no place for a plugin's own settings",
)
def add_config_flag(result: None, parser: argparse.ArgumentParser) -> None:
    """Add our option (AFTER hook of `ServerArgs.add_cli_args`)."""
    parser.add_argument(
        "--dspark-config",
        metavar="FILE",
        type=_use_config,
        help=f"YAML or JSON file with the settings of sglang-dspark (also {CONFIG_VARIABLE}).",
    )


def _use_config(file: str) -> str:
    """Read the file while the command line is parsed: before any process is spawned."""
    try:
        use_config_file(Path(file))
    except DSparkError as error:
        startup.stop(str(error))
    return file
