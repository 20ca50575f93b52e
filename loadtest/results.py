"""Result files: one JSON per published figure, with what is needed to take the figure again."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_dspark import __version__
from sglang_dspark.common.atomic_write import replace_text, require_file_or_nothing
from sglang_dspark.common.machine import with_speed
from sglang_dspark.errors import DSparkError

ROOT = Path(__file__).resolve().parents[1]
_NO_CODE = (":(exclude)results", ":(exclude)docs", ":(exclude)*.md")


def write_results(path: Path, name: str, device: str, metrics: Mapping[str, Any]) -> None:
    """Write `{name, command, commit, device, date, metrics}` atomically.

    device: as `cpu_description()` gives it, whose speed is then measured and added, or the GPU's
    name. Raises DSparkError when the place cannot be written, or must not be (`require_clean`);
    then what was measured is kept under `runs/`.
    """
    document = {
        "name": name,
        "command": command(),
        "commit": commit(),
        "device": with_speed(device),
        "date": now(),
        "metrics": _without_nan(metrics),
    }
    try:
        require_clean(path)
    except DSparkError as error:
        kept = Path("runs") / "not-published" / path.name
        write_document(kept, document)
        raise DSparkError(f"{error}; the figures are kept in {kept}") from None
    write_document(path, document)


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a result file's JSON atomically. Raises DSparkError when it cannot be written."""
    replace_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n", "results")


def require_clean(path: Path | None) -> None:
    """Raise DSparkError where `path` would be a published result of code that no commit holds, and
    where something other than a file stands.

    Called before a long measurement too, so that it is not made in vain. None is always allowed.
    """
    if path is None:
        return
    require_file_or_nothing(path)
    if not path.resolve().is_relative_to(ROOT / "results"):
        return
    changed = _changes() if (ROOT / ".git").exists() else []
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise DSparkError(
            f"{path} would be published from uncommitted changes ({changed[0]}{more}): commit them "
            "first, or write the result elsewhere"
        )


def command() -> str:
    """The command that runs, as it was typed."""
    return " ".join(["dspark", *sys.argv[1:]])


def now() -> str:
    """The present time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str:
    """The checkout's commit, `+changes` when files differ; else the installed package's version."""
    if not (ROOT / ".git").exists():  # installed; a repository around it would be someone else's
        return f"sglang-dspark {__version__}"
    return _git("rev-parse", "HEAD").strip() + ("+changes" if _changes() else "")


def _changes() -> list[str]:
    """Tracked files that differ from the commit, less those that no measurement depends on: a
    result file that was just written must not make the next one look unclean."""
    lines = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *_NO_CODE)
    return [line[3:] for line in lines.splitlines()]


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise DSparkError(f"cannot read the commit of {ROOT}: {error}") from error
    return done.stdout


def _without_nan(value: Any) -> Any:
    """The same value with null for NaN, which JSON does not have."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
