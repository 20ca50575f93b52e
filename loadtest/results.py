"""Write result files: one JSON per published figure, with command, commit and device."""

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

    device: the GPU's name, or `cpu_description()`, to which the CPU's measured speed is added.
    Raises DSparkError if `path` cannot be written, or must not be (`require_clean`): in the second
    case the metrics are saved under `runs/not-published/`.
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
    """Write a result file's JSON atomically. Raises DSparkError if it cannot be written."""
    replace_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n", "results")


def require_clean(path: Path | None) -> None:
    """Raise DSparkError if `path` is a folder, device or pipe, or a result of uncommitted code.

    The latter is about files under `results/`. Also called before a long measurement, so that it is
    not wasted. None is always allowed.
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
    """Return the command line of this run, as typed."""
    return " ".join(["dspark", *sys.argv[1:]])


def now() -> str:
    """Return the present time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str:
    """Return the checkout's commit, `+changes` if files differ; else the package's version."""
    if not (ROOT / ".git").exists():  # installed: a repository around it is another project's
        return f"sglang-dspark {__version__}"
    return _git("rev-parse", "HEAD").strip() + ("+changes" if _changes() else "")


def _changes() -> list[str]:
    """List tracked files that differ from the commit, without results and documentation.

    No measurement depends on those: a new result file must not make the next one look unclean.
    """
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
    """Return the value with null for NaN, which JSON lacks."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
