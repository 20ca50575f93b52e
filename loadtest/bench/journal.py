"""Journals of benches: JSON lines after a head, which holds the models, machine and code.

A killed run may leave an unfinished line: text after the last newline is cut off. A run with other
models, another machine or other code is refused, as its rows are not those of one measurement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.common.files import FAULTS, fault, parse_json
from sglang_dspark.common.hashes import file_sha256
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.results import commit
from sglang_dspark.loadtest.servers.workload import drafter_gamma
from sglang_dspark.models.identity import target_sha256
from sglang_dspark.schedule.sts_file import FILE_NAME

Head = Mapping[str, Any]
_Row = TypeVar("_Row")


def served_head(target: Path, drafter: Path, device: str) -> dict[str, Any]:
    """Collect the checksums and versions that all figures depend on. device: in words.

    Raises DSparkError for a folder without weights.
    """
    calibration = drafter / FILE_NAME
    return {
        "target": target_sha256(target),
        "drafter": target_sha256(drafter),
        "gamma": drafter_gamma(drafter),
        "calibration": file_sha256(calibration) if calibration.is_file() else "",
        "device": device,
        "commit": commit(),
    }


def open_journal(path: Path, head: Head, row: Callable[[Any], _Row]) -> list[_Row]:
    """Read the rows of a journal, or create it if it is missing.

    head: JSON-ready; row: converts a line's value. Raises DSparkError for a journal with another
    head, naming the differences, and for any other file.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if not text:
            whole = json.dumps(head) + "\n"
        first, *rows = [parse_json(line, finite=False) for line in whole.splitlines()]
        _require_same(path, first, head)
        found = [row(each) for each in rows]
    except OSError as error:
        raise DSparkError(f"cannot use the journal {path}: {fault(error)}") from None
    except FAULTS as error:
        raise DSparkError(f"{path} is no journal of this command ({fault(error)})") from None
    if whole != text:
        replace_text(path, whole, "the journal")
    return found


def keep_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a journal. Raises DSparkError if it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise DSparkError(f"cannot write the journal {path}: {fault(error)}") from None


def _require_same(path: Path, before: dict[str, Any], now: Head) -> None:
    other = [key for key in before | dict(now) if before.get(key) != now.get(key)]
    if other:
        raise DSparkError(
            f"{path} was measured with another {', '.join(other)}: its rows cannot be mixed with "
            "new ones; name another --resume, or leave it out to begin anew"
        )
