"""Python runs this at its start where PYTHONPATH names the folder: every process of a server."""

import os
import sys
from pathlib import Path

if os.environ.get("DSPARK_REHEARSAL"):
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from sglang_dspark import plugin

    def install() -> None:
        from tests.rehearsal.on_cpu import install_rehearsal

        install_rehearsal()

    plugin._install = install
