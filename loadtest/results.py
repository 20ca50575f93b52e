"""Result files: one JSON per published figure, with what is needed to take the figure again."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_dspark import __version__
from sglang_dspark.errors import DSparkError

_ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")


def write_results(path: Path, name: str, device: str, metrics: Mapping[str, Any]) -> None:
    """Write `{name, command, commit, device, date, metrics}` atomically.

    device: as `cpu_description()` gives it, or the GPU's name. Raises DSparkError when the place
    cannot be written.
    """
    document = {
        "name": name,
        "command": " ".join(["dspark", *sys.argv[1:]]),
        "commit": commit(),
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": _without_nan(metrics),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise DSparkError(f"cannot write results to {path}: {error.strerror}") from error


def commit() -> str:
    """The checkout's commit, `+changes` when files differ; else the installed package's version."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # installed; a repository around it would be someone else's
        return f"sglang-dspark {__version__}"
    head = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return head + ("+changes" if changed else "")


def cpu_description() -> str:
    """Model, instruction sets, usable cores and OpenMP setting of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if info.is_file():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = set(fields.get("flags", "").split())
    isa = " ".join(name for name in _ISA if name in flags) or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS", "server default")
    return f"{model}; {isa}; {cores} cores; OMP_NUM_THREADS {threads}"


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise DSparkError(f"cannot read the commit of {root}: {error}") from error
    return done.stdout.strip()


def _without_nan(value: Any) -> Any:
    """The same value with null for NaN, which JSON does not have."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
