"""Draw a command's output: `python tools/docs/picture.py [--part A B] OUT.svg COMMAND`.

`--part A B`, repeatable, shows the lines from the first with the text A up to the next with B,
excluded (to the last if B is empty). Without it all lines are shown.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.errors import DSparkError

WIDTH = 100
# Rich's variables: colours as on a terminal, without output that is overwritten.
TERMINAL = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(WIDTH)}


def picture(title: str, printed: str) -> str:
    """Draw `printed`, with its colours, as an SVG of a terminal window that loads no font."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(printed), soft_wrap=False)
    return re.sub(r"@font-face {.*?}", "", console.export_svg(title=title), flags=re.DOTALL)


def shown(printed: str, parts: Sequence[Sequence[str]]) -> str:
    """Join `parts` of the output by ellipses. Raises DSparkError if a part is missing."""
    lines = printed.replace(str(Path.home()), "~").rstrip().splitlines()
    cut = []
    for first, last in parts:
        begin = _line(lines, first, 0)
        end = _line(lines, last, begin + 1) if last else len(lines)
        cut.append("\n".join(lines[begin:end]).rstrip())
    return "\n\n…\n\n".join(cut)


def _line(lines: Sequence[str], text: str, start: int) -> int:
    """Find the index of the first line from `start` on whose text without colours has `text`.

    Raises DSparkError if there is none."""
    plain = (Text.from_ansi(line).plain for line in lines[start:])
    found = next((i for i, line in enumerate(plain, start) if text in line), None)
    if found is None:
        raise DSparkError(f"no line of the output has {text!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", nargs=2, action="append", metavar=("A", "B"), help="what to show")
    parser.add_argument("--title", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    environment = {**os.environ, **TERMINAL}
    done = subprocess.run(given.command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise DSparkError(f"{given.command[0]} ended with status {done.returncode}")
    title = given.title or " ".join(given.command)
    printed = shown(done.stdout, given.part or [("", "")])
    replace_text(given.out, picture(title, printed), "the picture")


if __name__ == "__main__":
    try:
        main()
    except DSparkError as error:
        sys.exit(f"picture: {error}")
