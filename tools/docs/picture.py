"""A picture of what a command prints: `python tools/docs/picture.py [--from TEXT] OUT.svg COMMAND`.

`--from` leaves out the lines in front of the first one that has TEXT.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sglang_dspark.errors import DSparkError
from sglang_dspark.files import replace_text

WIDTH = 100
# Rich's own variables: colours as on a terminal, and nothing that is drawn over.
TERMINAL = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(WIDTH)}


def picture(title: str, printed: str) -> str:
    """SVG of a terminal window with `printed` in it, colours and all."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(printed), soft_wrap=False)
    return console.export_svg(title=title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--from", dest="first", default="", help="first line to show has this text")
    parser.add_argument("--title", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    environment = {**os.environ, **TERMINAL}
    done = subprocess.run(given.command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise DSparkError(f"{given.command[0]} ended with status {done.returncode}")
    lines = done.stdout.splitlines()
    begin = next((i for i, line in enumerate(lines) if given.first in line), None)
    if begin is None:
        raise DSparkError(f"no line of the output has {given.first!r}")
    title = given.title or " ".join(given.command)
    replace_text(given.out, picture(title, "\n".join(lines[begin:])), "the picture")


if __name__ == "__main__":
    try:
        main()
    except DSparkError as error:
        sys.exit(f"picture: {error}")
