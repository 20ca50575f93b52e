"""Python runs this at its start where PYTHONPATH names the folder: every process of a server.

The one switch of injected faults is DSPARK_FAULTS, a folder; without it nothing happens here.
"""

import os
import sys
from pathlib import Path

if os.environ.get("DSPARK_FAULTS"):
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from sglang_dspark import plugin

    installed = plugin._install

    def install() -> None:
        installed()
        from tests.faults.injected import install_faults

        install_faults(Path(os.environ["DSPARK_FAULTS"]))

    plugin._install = install
