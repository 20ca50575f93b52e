"""Add `--dspark-config FILE` to the server's command line.

Upstream: sglang/srt/server_args.py, `ServerArgs.add_cli_args`. Plugins are loaded before
the command line is parsed, and `ServerArgs.from_cli_args` reads only its own fields from the
namespace, so one more option is safe. Its action names the file in `SGLANG_DSPARK_CONFIG`, which
the spawned processes inherit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import startup
from sglang_dspark.serving.config import CONFIG_VARIABLE, use_config_file

SEAMS = Seams()


class _ReadConfig(argparse.Action):
    """Read the file while the command line is parsed: before any process is spawned."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            use_config_file(Path(str(values)))
        except DSparkError as error:
            startup.stop(str(error))
        setattr(namespace, self.dest, values)


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
        action=_ReadConfig,
        help=f"YAML or JSON file with the settings of sglang-dspark (also {CONFIG_VARIABLE}).",
    )
