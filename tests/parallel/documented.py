"""Read the commands of docs/parallel.md, to be run verbatim."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parallel.md"
LOCUSTFILE = "loadtest/client/locustfile.py"


def documented(name: str, **filled: str) -> list[str]:
    """Words of the page's block behind <!-- NAME -->.

    filled: values for CAPITAL words. `python`, `locust` and `torchrun` become this
    interpreter's own.
    """
    block = rf"^<!-- {name} -->\n```sh\n(.*?)^```"
    found = re.findall(block, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{len(found)} blocks named {name}"
    words = shlex.split(found[0].replace("\\\n", " "))
    words = [filled.get(word, word) for word in words]
    capitals = [word for word in words if re.fullmatch(r"[A-Z]{2,}", word) and word != "DSPARK"]
    assert not set(capitals) - set(filled.values()), f"{capitals} stand for what?"
    return [*_HEADS[words[0]], *words[1:]]


_HEADS: dict[str, Sequence[str]] = {
    "python": [sys.executable],
    "locust": [sys.executable, "-m", "locust"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
